"""How nodes agree on a generation: a pure coordinator and pure rank assignment."""
