"""Split and step a model, one engine a file.

`registry.engine` builds one by its name in `ENGINES`.
"""
