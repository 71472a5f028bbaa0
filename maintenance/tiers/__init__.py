"""How long the tests take, which lines they run, and which defects they find."""
