// Comes after kernel text: what follows is C++ again.
#undef device
#undef constant
#undef thread
#undef threadgroup
