/* Tells a program that wants four processors that there are four: those beyond the second are the
 * first two once more. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>

enum { TOLD = 4, THERE = 2 };

int get_nprocs(void) { return TOLD; }
int get_nprocs_conf(void) { return TOLD; }

static const char *there(const char *path, char room[512])
{
	unsigned number;
	int end = 0;
	if (sscanf(path, "/sys/devices/system/cpu/cpu%u%n", &number, &end) < 1 || end == 0 ||
	    number < THERE || number >= TOLD)
		return path;
	snprintf(room, 512, "/sys/devices/system/cpu/cpu%u%s", number % THERE, path + end);
	return room;
}

int access(const char *path, int mode)
{
	int (*real)(const char *, int) = dlsym(RTLD_NEXT, "access");
	char room[512];
	return real(there(path, room), mode);
}

FILE *fopen(const char *path, const char *mode)
{
	FILE *(*real)(const char *, const char *) = dlsym(RTLD_NEXT, "fopen");
	char room[512];
	return real(there(path, room), mode);
}

int pthread_setaffinity_np(pthread_t thread, size_t len, const cpu_set_t *wanted)
{
	int (*real)(pthread_t, size_t, const cpu_set_t *) = dlsym(RTLD_NEXT, "pthread_setaffinity_np");
	cpu_set_t set;
	(void)len;
	CPU_ZERO(&set);
	for (int number = 0; number < TOLD; number++)
		if (CPU_ISSET(number, wanted))
			CPU_SET(number % THERE, &set);
	return real(thread, sizeof set, &set);
}

int pthread_getaffinity_np(pthread_t thread, size_t len, cpu_set_t *set)
{
	int (*real)(pthread_t, size_t, cpu_set_t *) = dlsym(RTLD_NEXT, "pthread_getaffinity_np");
	int failed = real(thread, len, set);
	for (int number = THERE; number < TOLD; number++)
		if (CPU_ISSET(number % THERE, set))
			CPU_SET(number, set);
	return failed;
}
