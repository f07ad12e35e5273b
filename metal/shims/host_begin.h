// Comes right before kernel text, and after every C++ header: defines Metal's address
// spaces as empty macros, because the host has only one.  [[kernel]] and [[buffer(n)]]
// are attributes, which C++ ignores.
#define device
#define constant
#define thread
#define threadgroup
