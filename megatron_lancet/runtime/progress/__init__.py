"""How far the forwards and the backwards of a rank are: one after the other, or side by side in pairs."""
