// Comes right before kernel text, and after every C++ header: the address spaces
// of Metal become macros, of nothing, because the host has only one.  [[kernel]]
// and [[buffer(n)]] are attributes, which C++ ignores.
#define device
#define constant
#define thread
#define threadgroup
