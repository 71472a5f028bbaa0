"""Plugins: finding drivers, tools and other plugins among the installed distributions.

`installed` lists entry points, `discovery` loads and registers drivers, and `framework_imports`
and `imports` notice the import of a framework.
"""
