/* Binds TCP sockets to loopback that a program would bind to all interfaces.

   Preloaded into the processes of Open MPI where all ranks are on one host: its daemons and
   its TCP transport listen on every interface, whatever their parameters say. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <stddef.h>
#include <sys/socket.h>

typedef int (*bind_function)(int, const struct sockaddr *, socklen_t);

static int is_stream(int fd) {
    int type = 0;
    socklen_t length = sizeof type;
    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0 && type == SOCK_STREAM;
}

int bind(int fd, const struct sockaddr *address, socklen_t length) {
    bind_function next = (bind_function)dlsym(RTLD_NEXT, "bind");
    if (address != NULL && address->sa_family == AF_INET
        && length >= sizeof(struct sockaddr_in) && is_stream(fd)) {
        struct sockaddr_in here = *(const struct sockaddr_in *)address;
        if (here.sin_addr.s_addr == htonl(INADDR_ANY)) {
            here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            return next(fd, (const struct sockaddr *)&here, sizeof here);
        }
    }
    if (address != NULL && address->sa_family == AF_INET6
        && length >= sizeof(struct sockaddr_in6) && is_stream(fd)) {
        struct sockaddr_in6 here = *(const struct sockaddr_in6 *)address;
        if (IN6_IS_ADDR_UNSPECIFIED(&here.sin6_addr)) {
            here.sin6_addr = in6addr_loopback;
            return next(fd, (const struct sockaddr *)&here, sizeof here);
        }
    }
    return next(fd, address, length);
}
