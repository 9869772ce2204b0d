"""How a model is split and stepped: one engine a file. `make.engine` makes one by its name; `options` lists them."""
