"""Looks at pages in Chromium: reports of runs, and the documentation's site."""
