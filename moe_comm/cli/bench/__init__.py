"""`moe-comm bench`: a case is checked against the definition, then timed between two roofs."""
