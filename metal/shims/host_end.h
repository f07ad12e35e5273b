// Comes after kernel text: undefines the macros of host_begin.h.
#undef device
#undef constant
#undef thread
#undef threadgroup
