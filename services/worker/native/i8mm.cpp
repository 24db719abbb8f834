// Built with the flags setup.py names for i8mm; called only where blockrelay_cpu_features() has what it needs.
#include "kernels.h"

// Makes the file an extension module to the packaging tools; it is opened with ctypes and never imported.
BLOCKRELAY_EXPORT void* PyInit__i8mm(void) { return nullptr; }
