"""Which blocks form which stage, and which worker runs which stage. Pure: workers in, plan out."""
