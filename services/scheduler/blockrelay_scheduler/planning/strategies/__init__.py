"""The strategies: each a pure function from a `Problem` to a `Placement`, in a file of its own. `registry` has all."""
