// Material makes blocks of code and tables that scroll. Let the keyboard reach them. The buttons of
// a block are not a landmark.
const mend = () => {
  for (const one of document.querySelectorAll(
    '.md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset table'))
    if (one.scrollWidth > one.clientWidth && one.tabIndex < 0) one.tabIndex = 0;
  for (const one of document.querySelectorAll('.md-code__nav:not([role])')) one.role = 'none';
};
let due = false;
const later = () => {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    mend();
  });
};
new MutationObserver(later).observe(document.documentElement, {
  subtree: true, childList: true, attributeFilter: ['tabindex', 'open'],
});
addEventListener('resize', later);
addEventListener('load', later);
