"""The engine: tools, their requests, plans, contexts, and the session of applied tools.

Tool, action, plan, context and session are one concept and may know one another. `activation`
applies tools and removes them; `selection` and `calls` restrict them.
"""
