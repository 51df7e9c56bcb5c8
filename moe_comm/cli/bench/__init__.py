"""`moe-comm bench`: a case is checked against an oracle, then timed between two roofs."""
