//! System calls that a server makes, by group, and the filter rules made of them.
//!
//! A row is here because the program has been seen to make the call (`crates/cli/tests/program/sandbox.rs`
//! compares this list with what strace reports), or because its note says when it does.

use super::filter_program::{ArgumentCondition, FilterAction, FilterRules, FilterVerdict};

/// Groups of system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CallGroup {
    /// Memory, threads, signals and time.
    Process,
    /// Files and block devices.
    Files,
    /// Waiting for descriptors.
    Events,
    /// Sockets of the families that are in use.
    Sockets,
    /// Submission rings of the kernel. The filter does not see the operations in a ring.
    IoUring,
    /// Reading keys in keyrings of the kernel.
    KernelKeys,
}

/// Families of sockets, besides AF_UNIX, which every server has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketFamilies {
    /// AF_INET and AF_INET6.
    pub inet: bool,
    /// AF_NETLINK: device events, receive queues of a network card.
    pub netlink: bool,
}

/// What a filter allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedCalls {
    /// Groups of calls.
    pub groups: Vec<CallGroup>,
    /// Families of sockets.
    pub families: SocketFamilies,
}

struct CallRow {
    name: &'static str,
    number: libc::c_long,
    group: CallGroup,
    check: Check,
}

/// Check of arguments.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Check {
    /// Any arguments.
    None,
    /// Memory is not writable and executable at once.
    MemoryMap,
    /// Memory does not become executable.
    MemoryProtection,
    /// A thread of this process, in the same namespaces.
    NewThread,
    /// A signal to this process.
    OwnProcess,
    /// A limit of this process is read.
    ReadLimit,
    /// Name, timer slack and names of memory, of a thread; signal at the end of the parent.
    ThreadAttribute,
    /// Control of block devices, VFIO devices, loop devices, network cards; non-blocking mode.
    DeviceControl,
    /// A socket of a family in use.
    Family,
    /// A pair of AF_UNIX sockets.
    LocalFamily,
    /// A key is found and read.
    ReadKey,
    /// Fails with ENOSYS, upon which the C library makes the older call, whose arguments can be checked.
    OlderCall,
}

const fn row(name: &'static str, number: libc::c_long, group: CallGroup) -> CallRow {
    CallRow { name, number, group, check: Check::None }
}

const fn checked(
    name: &'static str,
    number: libc::c_long,
    group: CallGroup,
    check: Check,
) -> CallRow {
    CallRow { name, number, group, check }
}

use CallGroup::{Events, Files, IoUring, KernelKeys, Process, Sockets};

/// Calls per I/O first: the filter compares these one by one, in this order.
const FREQUENT: &[CallRow] = &[
    #[cfg(target_arch = "x86_64")]
    row("epoll_wait", libc::SYS_epoll_wait, Events),
    row("epoll_pwait", libc::SYS_epoll_pwait, Events),
    row("recvmsg", libc::SYS_recvmsg, Sockets),
    row("sendmsg", libc::SYS_sendmsg, Sockets),
    row("io_uring_enter", libc::SYS_io_uring_enter, IoUring),
    row("read", libc::SYS_read, Files),
    row("write", libc::SYS_write, Files),
    row("recvfrom", libc::SYS_recvfrom, Sockets),
    row("sendto", libc::SYS_sendto, Sockets),
    row("membarrier", libc::SYS_membarrier, Process),
    row("epoll_pwait2", libc::SYS_epoll_pwait2, Events),
    row("futex", libc::SYS_futex, Process),
];

const OTHERS: &[CallRow] = &[
    // Memory.
    checked("mmap", libc::SYS_mmap, Process, Check::MemoryMap),
    checked("mprotect", libc::SYS_mprotect, Process, Check::MemoryProtection),
    row("munmap", libc::SYS_munmap, Process),
    row("mremap", libc::SYS_mremap, Process),
    row("madvise", libc::SYS_madvise, Process),
    row("brk", libc::SYS_brk, Process),
    // Memory of keys and of devices.
    row("mlock", libc::SYS_mlock, Process),
    row("mlock2", libc::SYS_mlock2, Process),
    row("munlock", libc::SYS_munlock, Process),
    row("memfd_create", libc::SYS_memfd_create, Process),
    // Threads.
    checked("clone", libc::SYS_clone, Process, Check::NewThread),
    checked("clone3", libc::SYS_clone3, Process, Check::OlderCall),
    row("set_robust_list", libc::SYS_set_robust_list, Process),
    row("set_tid_address", libc::SYS_set_tid_address, Process),
    row("rseq", libc::SYS_rseq, Process),
    row("exit", libc::SYS_exit, Process),
    row("exit_group", libc::SYS_exit_group, Process),
    row("gettid", libc::SYS_gettid, Process),
    row("getpid", libc::SYS_getpid, Process),
    row("getppid", libc::SYS_getppid, Process),
    row("getcpu", libc::SYS_getcpu, Process),
    row("sched_yield", libc::SYS_sched_yield, Process),
    row("sched_getaffinity", libc::SYS_sched_getaffinity, Process),
    row("sched_setaffinity", libc::SYS_sched_setaffinity, Process),
    checked("prctl", libc::SYS_prctl, Process, Check::ThreadAttribute),
    // Signals; tgkill ends a process that has panicked (abort(3)).
    row("rt_sigaction", libc::SYS_rt_sigaction, Process),
    row("rt_sigprocmask", libc::SYS_rt_sigprocmask, Process),
    row("rt_sigreturn", libc::SYS_rt_sigreturn, Process),
    row("sigaltstack", libc::SYS_sigaltstack, Process),
    checked("tgkill", libc::SYS_tgkill, Process, Check::OwnProcess),
    row("restart_syscall", libc::SYS_restart_syscall, Process),
    row("setitimer", libc::SYS_setitimer, Process),
    // Time: where the kernel's clock cannot be read in user space.
    row("clock_gettime", libc::SYS_clock_gettime, Process),
    row("clock_getres", libc::SYS_clock_getres, Process),
    row("gettimeofday", libc::SYS_gettimeofday, Process),
    row("clock_nanosleep", libc::SYS_clock_nanosleep, Process),
    row("nanosleep", libc::SYS_nanosleep, Process),
    // The process and the machine.
    row("getrandom", libc::SYS_getrandom, Process),
    row("uname", libc::SYS_uname, Process),
    row("sysinfo", libc::SYS_sysinfo, Process),
    row("getrusage", libc::SYS_getrusage, Process),
    checked("prlimit64", libc::SYS_prlimit64, Process, Check::ReadLimit),
    row("getuid", libc::SYS_getuid, Process),
    row("geteuid", libc::SYS_geteuid, Process),
    row("getgid", libc::SYS_getgid, Process),
    row("getegid", libc::SYS_getegid, Process),
    row("capget", libc::SYS_capget, Process),
    // Files.
    row("openat", libc::SYS_openat, Files),
    // musl opens files by it.
    #[cfg(target_arch = "x86_64")]
    row("open", libc::SYS_open, Files),
    row("close", libc::SYS_close, Files),
    row("readv", libc::SYS_readv, Files),
    row("writev", libc::SYS_writev, Files),
    // The engine for files without io_uring.
    row("pread64", libc::SYS_pread64, Files),
    row("pwrite64", libc::SYS_pwrite64, Files),
    row("preadv", libc::SYS_preadv, Files),
    row("pwritev", libc::SYS_pwritev, Files),
    row("preadv2", libc::SYS_preadv2, Files),
    row("pwritev2", libc::SYS_pwritev2, Files),
    row("fsync", libc::SYS_fsync, Files),
    row("fdatasync", libc::SYS_fdatasync, Files),
    row("fallocate", libc::SYS_fallocate, Files),
    row("ftruncate", libc::SYS_ftruncate, Files),
    row("lseek", libc::SYS_lseek, Files),
    row("copy_file_range", libc::SYS_copy_file_range, Files),
    row("flock", libc::SYS_flock, Files),
    row("fcntl", libc::SYS_fcntl, Files),
    checked("ioctl", libc::SYS_ioctl, Files, Check::DeviceControl),
    row("dup", libc::SYS_dup, Files),
    row("dup3", libc::SYS_dup3, Files),
    row("pipe2", libc::SYS_pipe2, Files),
    row("fstat", libc::SYS_fstat, Files),
    row("newfstatat", libc::SYS_newfstatat, Files),
    #[cfg(target_arch = "x86_64")]
    row("stat", libc::SYS_stat, Files),
    #[cfg(target_arch = "x86_64")]
    row("lstat", libc::SYS_lstat, Files),
    row("statx", libc::SYS_statx, Files),
    row("fstatfs", libc::SYS_fstatfs, Files),
    row("statfs", libc::SYS_statfs, Files),
    row("faccessat", libc::SYS_faccessat, Files),
    row("faccessat2", libc::SYS_faccessat2, Files),
    #[cfg(target_arch = "x86_64")]
    row("access", libc::SYS_access, Files),
    row("readlinkat", libc::SYS_readlinkat, Files),
    #[cfg(target_arch = "x86_64")]
    row("readlink", libc::SYS_readlink, Files),
    row("getdents64", libc::SYS_getdents64, Files),
    row("getcwd", libc::SYS_getcwd, Files),
    row("umask", libc::SYS_umask, Files),
    row("fchmod", libc::SYS_fchmod, Files),
    row("fchmodat", libc::SYS_fchmodat, Files),
    #[cfg(target_arch = "x86_64")]
    row("chmod", libc::SYS_chmod, Files),
    row("linkat", libc::SYS_linkat, Files),
    row("unlinkat", libc::SYS_unlinkat, Files),
    #[cfg(target_arch = "x86_64")]
    row("unlink", libc::SYS_unlink, Files),
    row("renameat", libc::SYS_renameat, Files),
    row("renameat2", libc::SYS_renameat2, Files),
    #[cfg(target_arch = "x86_64")]
    row("rename", libc::SYS_rename, Files),
    row("mkdirat", libc::SYS_mkdirat, Files),
    #[cfg(target_arch = "x86_64")]
    row("mkdir", libc::SYS_mkdir, Files),
    // Waiting.
    row("epoll_create1", libc::SYS_epoll_create1, Events),
    // Of librados, which ends the process without it.
    #[cfg(target_arch = "x86_64")]
    row("epoll_create", libc::SYS_epoll_create, Events),
    row("epoll_ctl", libc::SYS_epoll_ctl, Events),
    row("eventfd2", libc::SYS_eventfd2, Events),
    // Of librbd.
    row("timerfd_create", libc::SYS_timerfd_create, Events),
    row("timerfd_settime", libc::SYS_timerfd_settime, Events),
    row("ppoll", libc::SYS_ppoll, Events),
    #[cfg(target_arch = "x86_64")]
    row("poll", libc::SYS_poll, Events),
    // Sockets.
    checked("socket", libc::SYS_socket, Sockets, Check::Family),
    checked("socketpair", libc::SYS_socketpair, Sockets, Check::LocalFamily),
    row("bind", libc::SYS_bind, Sockets),
    row("listen", libc::SYS_listen, Sockets),
    row("accept4", libc::SYS_accept4, Sockets),
    // Of the administration socket of librados, whose thread would try again without a pause.
    row("accept", libc::SYS_accept, Sockets),
    row("connect", libc::SYS_connect, Sockets),
    row("shutdown", libc::SYS_shutdown, Sockets),
    row("getsockname", libc::SYS_getsockname, Sockets),
    row("getpeername", libc::SYS_getpeername, Sockets),
    row("getsockopt", libc::SYS_getsockopt, Sockets),
    row("setsockopt", libc::SYS_setsockopt, Sockets),
    // Name resolution.
    row("sendmmsg", libc::SYS_sendmmsg, Sockets),
    row("recvmmsg", libc::SYS_recvmmsg, Sockets),
    // Rings.
    row("io_uring_setup", libc::SYS_io_uring_setup, IoUring),
    row("io_uring_register", libc::SYS_io_uring_register, IoUring),
    // Keys of TLS that the kernel has.
    checked("keyctl", libc::SYS_keyctl, KernelKeys, Check::ReadKey),
];

/// Calls that no part of a server makes. One of them means that foreign code runs in the process, so
/// the process ends.
const FATAL: &[(&str, libc::c_long)] = &[
    ("execve", libc::SYS_execve),
    ("execveat", libc::SYS_execveat),
    ("ptrace", libc::SYS_ptrace),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("process_vm_writev", libc::SYS_process_vm_writev),
    ("pidfd_getfd", libc::SYS_pidfd_getfd),
    ("init_module", libc::SYS_init_module),
    ("finit_module", libc::SYS_finit_module),
    ("delete_module", libc::SYS_delete_module),
    ("kexec_load", libc::SYS_kexec_load),
    ("bpf", libc::SYS_bpf),
    ("userfaultfd", libc::SYS_userfaultfd),
    ("mount", libc::SYS_mount),
    ("umount2", libc::SYS_umount2),
    ("pivot_root", libc::SYS_pivot_root),
    ("chroot", libc::SYS_chroot),
    ("setns", libc::SYS_setns),
    ("unshare", libc::SYS_unshare),
    ("reboot", libc::SYS_reboot),
    ("swapon", libc::SYS_swapon),
];

/// Types of ioctl requests that are accepted, by `linux/ioctl.h` in bits 8 to 15: block devices (0x12),
/// VFIO and iommufd (`;`), loop devices (`L`), NVMe (`N`), network cards (0x89).
const IOCTL_TYPES: [u32; 5] = [0x1200, 0x3b00, 0x4c00, 0x4e00, 0x8900];
/// Single requests: FIONBIO, FIONREAD, TCGETS and TIOCGWINSZ, which do not change a terminal.
const IOCTL_REQUESTS: [u32; 4] = [0x5421, 0x541b, 0x5401, 0x5413];
const PRCTL_OPTIONS: [libc::c_int; 6] = [
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    libc::PR_SET_TIMERSLACK,
    libc::PR_GET_TIMERSLACK,
    libc::PR_SET_PDEATHSIG,
    PR_SET_VMA,
];
/// Operations of `keyctl`: a key is described and read, while the thread has a link to its keyring
/// (KEYCTL_DESCRIBE, KEYCTL_LINK, KEYCTL_UNLINK, KEYCTL_READ of linux/keyctl.h).
const KEYCTL_OPERATIONS: [u32; 4] = [6, 8, 9, 11];
/// Names memory of the C library's allocator in /proc (prctl(2)).
const PR_SET_VMA: libc::c_int = 0x5356_4d41;

/// Bits of an argument of type `int`.
const INT: u64 = 0xffff_ffff;

impl CallGroup {
    /// All groups.
    pub const ALL: [Self; 6] = [Process, Files, Events, Sockets, IoUring, KernelKeys];

    /// Word for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Process => "process",
            Files => "files",
            Events => "events",
            Sockets => "sockets",
            IoUring => "io_uring",
            KernelKeys => "kernel-keys",
        }
    }
}

impl AllowedCalls {
    /// Names of the calls that are allowed, some with certain arguments only.
    pub fn names(&self) -> Vec<&'static str> {
        let rows = self.rows().filter(|row| row.check != Check::OlderCall);
        let mut names: Vec<_> = rows.map(|row| row.name).collect();
        names.sort_unstable();
        names
    }

    fn rows(&self) -> impl Iterator<Item = &'static CallRow> {
        FREQUENT.iter().chain(OTHERS).filter(|row| self.groups.contains(&row.group))
    }

    /// Rules of a filter. With `only_reports` nothing is denied, and the kernel logs what would be.
    pub(super) fn rules(&self, only_reports: bool) -> FilterRules {
        let (trap, kill) = match only_reports {
            true => (FilterAction::Log, FilterAction::Log),
            false => (FilterAction::Trap, FilterAction::Kill),
        };
        let frequent = FREQUENT.iter().filter(|row| self.groups.contains(&row.group));
        let verdict = |row: &CallRow| {
            let FilterAction::Allow = self.action(row) else {
                return (call_number(row.number), FilterVerdict::Always(self.action(row)));
            };
            let verdict = match self.conditions(row.check) {
                _ if row.check == Check::OlderCall => {
                    FilterVerdict::Always(if only_reports { FilterAction::Allow } else { NO_CALL })
                }
                alternatives if alternatives.is_empty() => {
                    FilterVerdict::Always(FilterAction::Allow)
                }
                alternatives => FilterVerdict::Check { alternatives, otherwise: trap },
            };
            (call_number(row.number), verdict)
        };
        let fatal =
            FATAL.iter().map(|(_, number)| (call_number(*number), FilterVerdict::Always(kill)));
        FilterRules {
            frequent: frequent.map(|row| call_number(row.number)).collect(),
            verdicts: OTHERS
                .iter()
                .map(verdict)
                .chain(self.excluded_frequent(only_reports))
                .chain(fatal)
                .collect(),
            otherwise: trap,
            foreign: kill,
        }
    }

    /// Calls of a group that is not in use fail without a report: a probe for them is expected.
    fn action(&self, row: &CallRow) -> FilterAction {
        if self.groups.contains(&row.group) { FilterAction::Allow } else { DENIED }
    }

    fn excluded_frequent(&self, only_reports: bool) -> impl Iterator<Item = (u32, FilterVerdict)> {
        let action = if only_reports { FilterAction::Log } else { DENIED };
        let excluded = FREQUENT.iter().filter(|row| !self.groups.contains(&row.group));
        excluded.map(move |row| (call_number(row.number), FilterVerdict::Always(action)))
    }

    /// Alternatives, each a list of conditions; none if any arguments are accepted.
    fn conditions(&self, check: Check) -> Vec<Vec<ArgumentCondition>> {
        let one = |argument, mask, values: &[u32]| ArgumentCondition {
            argument,
            mask,
            values: values.to_vec(),
        };
        let (write, exec) = (unsigned(libc::PROT_WRITE), unsigned(libc::PROT_EXEC));
        let own = std::process::id();
        match check {
            Check::None | Check::OlderCall => Vec::new(),
            Check::MemoryMap => {
                vec![vec![one(2, u64::from(write | exec), &[0, write, exec])]]
            }
            Check::MemoryProtection => vec![vec![one(2, u64::from(exec), &[0])]],
            Check::NewThread => {
                let thread = unsigned(libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND);
                let namespaces = unsigned(
                    libc::CLONE_NEWNS
                        | libc::CLONE_NEWUTS
                        | libc::CLONE_NEWIPC
                        | libc::CLONE_NEWUSER
                        | libc::CLONE_NEWPID
                        | libc::CLONE_NEWNET
                        | libc::CLONE_NEWCGROUP,
                );
                vec![vec![one(0, u64::from(thread | namespaces), &[thread])]]
            }
            Check::OwnProcess => vec![vec![one(0, INT, &[own])]],
            Check::ReadLimit => vec![vec![one(0, INT, &[0, own]), one(2, u64::MAX, &[0])]],
            Check::ThreadAttribute => vec![vec![one(0, INT, &PRCTL_OPTIONS.map(unsigned))]],
            Check::DeviceControl => {
                vec![vec![one(1, 0xff00, &IOCTL_TYPES)], vec![one(1, INT, &IOCTL_REQUESTS)]]
            }
            Check::ReadKey => vec![vec![one(0, INT, &KEYCTL_OPERATIONS)]],
            Check::Family => vec![vec![one(0, INT, &self.family_numbers())]],
            Check::LocalFamily => vec![vec![one(0, INT, &[unsigned(libc::AF_UNIX)])]],
        }
    }

    fn family_numbers(&self) -> Vec<u32> {
        let mut families = vec![unsigned(libc::AF_UNIX)];
        if self.families.inet {
            families.extend([unsigned(libc::AF_INET), unsigned(libc::AF_INET6)]);
        }
        if self.families.netlink {
            families.push(unsigned(libc::AF_NETLINK));
        }
        families
    }
}

/// EPERM without a report.
const DENIED: FilterAction = FilterAction::Fail(1);
/// ENOSYS.
const NO_CALL: FilterAction = FilterAction::Fail(38);

/// Name of a system call with this number, as far as this module knows it.
pub(super) fn call_name(number: u32) -> String {
    let rows = FREQUENT.iter().chain(OTHERS).map(|row| (row.name, row.number));
    let found = rows.chain(FATAL.iter().copied()).find(|(_, of)| call_number(*of) == number);
    found.map_or_else(|| format!("system call {number}"), |(name, _)| name.to_owned())
}

fn call_number(number: libc::c_long) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

const fn unsigned(number: libc::c_int) -> u32 {
    number.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::filter_program::tests::{check_program, run_program};
    use super::super::filter_program::{ARCHITECTURE, FilterAction, filter_program};
    use super::{AllowedCalls, CallGroup, FATAL, FREQUENT, OTHERS, SocketFamilies, call_name};

    fn everything() -> AllowedCalls {
        AllowedCalls {
            groups: CallGroup::ALL.to_vec(),
            families: SocketFamilies { inet: true, netlink: true },
        }
    }

    fn result_of(allowed: &AllowedCalls, number: libc::c_long, arguments: [u64; 6]) -> u32 {
        let architecture = ARCHITECTURE.unwrap();
        let program = filter_program(&allowed.rules(false), architecture);
        run_program(&program, architecture, u32::try_from(number).unwrap(), arguments)
    }

    #[test]
    fn call_is_listed_once() {
        let rows = FREQUENT.iter().chain(OTHERS).map(|row| row.number);
        let numbers: Vec<_> = rows.chain(FATAL.iter().map(|(_, number)| *number)).collect();
        assert_eq!(numbers.iter().collect::<BTreeSet<_>>().len(), numbers.len());
        assert_eq!(call_name(u32::try_from(libc::SYS_futex).unwrap()), "futex");
        assert_eq!(call_name(9999), "system call 9999");
    }

    #[test]
    fn program_of_every_choice_of_groups_decides_as_its_rules() {
        let values = [0, 1, 2, 4, 6, 0x10000, 0x12ff, 0x5421, 0x1_0000_0001, u64::MAX];
        let few = AllowedCalls {
            groups: vec![CallGroup::Process, CallGroup::Files, CallGroup::Events],
            families: SocketFamilies::default(),
        };
        for allowed in [everything(), few] {
            for only_reports in [false, true] {
                check_program(&allowed.rules(only_reports), &values);
            }
        }
    }

    #[test]
    fn arguments_that_would_widen_the_rights_are_denied() {
        let allowed = everything();
        let (allow, trap) = (FilterAction::Allow.return_value(), FilterAction::Trap.return_value());
        let own = u64::from(std::process::id());
        let thread = (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND) as u64;
        let cases: &[(libc::c_long, [u64; 6], u32)] = &[
            (libc::SYS_mmap, [0, 4096, 3, 0, 0, 0], allow),
            (libc::SYS_mmap, [0, 4096, 5, 0, 0, 0], allow),
            (libc::SYS_mmap, [0, 4096, 7, 0, 0, 0], trap),
            (libc::SYS_mprotect, [0, 4096, 3, 0, 0, 0], allow),
            (libc::SYS_mprotect, [0, 4096, 5, 0, 0, 0], trap),
            (libc::SYS_clone, [thread | 0x1000, 0, 0, 0, 0, 0], allow),
            (libc::SYS_clone, [17, 0, 0, 0, 0, 0], trap),
            (libc::SYS_clone, [thread | libc::CLONE_NEWUSER as u64, 0, 0, 0, 0, 0], trap),
            (libc::SYS_tgkill, [own, 1, 6, 0, 0, 0], allow),
            (libc::SYS_tgkill, [1, 1, 6, 0, 0, 0], trap),
            (libc::SYS_prlimit64, [0, 7, 0, 1, 0, 0], allow),
            (libc::SYS_prlimit64, [0, 7, 0x7fff_0000_0000, 1, 0, 0], trap),
            (libc::SYS_prlimit64, [1, 7, 0, 1, 0, 0], trap),
            (libc::SYS_ioctl, [0, 0x5421, 0, 0, 0, 0], allow),
            (libc::SYS_ioctl, [0, 0x5412, 0, 0, 0, 0], trap), // TIOCSTI
            (libc::SYS_ioctl, [0, 0x541c, 0, 0, 0, 0], trap), // TIOCLINUX
            (libc::SYS_socket, [libc::AF_INET6 as u64, 1, 0, 0, 0, 0], allow),
            (libc::SYS_socket, [libc::AF_PACKET as u64, 3, 0, 0, 0, 0], trap),
            (libc::SYS_prctl, [libc::PR_SET_NAME as u64, 0, 0, 0, 0, 0], allow),
            (libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 1, 0, 0, 0, 0], trap),
            (libc::SYS_keyctl, [11, 1, 0, 0, 0, 0], allow), // KEYCTL_READ
            (libc::SYS_keyctl, [3, 1, 0, 0, 0, 0], trap),   // KEYCTL_REVOKE
            (libc::SYS_keyctl, [5, 1, 0, 0, 0, 0], trap),   // KEYCTL_SETPERM
            (libc::SYS_add_key, [0; 6], trap),
            (libc::SYS_setuid, [0; 6], trap),
            (libc::SYS_kill, [own, 9, 0, 0, 0, 0], trap),
            (libc::SYS_execve, [0; 6], FilterAction::Kill.return_value()),
            (libc::SYS_clone3, [0; 6], FilterAction::Fail(38).return_value()),
            (500, [0; 6], FilterAction::Fail(38).return_value()),
        ];
        for (number, arguments, expected) in cases {
            assert_eq!(
                result_of(&allowed, *number, *arguments),
                *expected,
                "{number} {arguments:x?}"
            );
        }
    }

    #[test]
    fn group_and_family_that_are_not_in_use_are_denied() {
        let allowed = AllowedCalls {
            groups: vec![CallGroup::Process, CallGroup::Files, CallGroup::Sockets],
            families: SocketFamilies::default(),
        };
        let denied = FilterAction::Fail(1).return_value();
        assert_eq!(result_of(&allowed, libc::SYS_io_uring_setup, [0; 6]), denied);
        assert_eq!(result_of(&allowed, libc::SYS_keyctl, [11, 1, 0, 0, 0, 0]), denied);
        assert_eq!(result_of(&allowed, libc::SYS_io_uring_enter, [0; 6]), denied);
        let inet = [libc::AF_INET as u64, 1, 0, 0, 0, 0];
        assert_eq!(result_of(&allowed, libc::SYS_socket, inet), FilterAction::Trap.return_value());
        assert!(!allowed.names().contains(&"io_uring_enter"));
        assert!(allowed.names().contains(&"openat") && !allowed.names().contains(&"clone3"));
    }
}
