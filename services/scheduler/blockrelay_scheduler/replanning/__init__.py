"""Plans that follow measurements: what the blocks of a running system take corrects the profile, and moves borders."""
