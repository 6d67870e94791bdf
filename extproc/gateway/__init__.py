"""Configuration to Envoy bootstrap; ``names`` alone is what ``serve`` shares with it."""
