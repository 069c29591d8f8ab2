"""What was seen: engine traces and other observations, and what a fit reads off them."""
