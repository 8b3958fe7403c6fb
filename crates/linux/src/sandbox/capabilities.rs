//! Capabilities of threads (capabilities(7)).

use std::fmt;

use rustix::io::Errno;

use super::raw_call;

/// A set of capabilities: a bit for each number (`linux/capability.h`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CapabilitySet(pub u64);

/// The capability sets of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadCapabilities {
    /// Capabilities that are in effect.
    pub effective: CapabilitySet,
    /// Capabilities that may be put into effect.
    pub permitted: CapabilitySet,
    /// Capabilities that pass to a program that declares them.
    pub inheritable: CapabilitySet,
}

/// Names by number, without the prefix `CAP_`.
const NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

impl CapabilitySet {
    /// No capability.
    pub const NONE: Self = Self(0);
    /// Overrides the permissions of files.
    pub const DAC_OVERRIDE: Self = Self(1 << 1);
    /// Bypasses the checks of the owner of a file.
    pub const FOWNER: Self = Self(1 << 3);
    /// Changes the bounding set.
    pub const SETPCAP: Self = Self(1 << 8);
    /// Binds ports below 1024.
    pub const NET_BIND_SERVICE: Self = Self(1 << 10);
    /// Sets privileged socket options.
    pub const NET_ADMIN: Self = Self(1 << 12);
    /// Locks memory beyond RLIMIT_MEMLOCK.
    pub const IPC_LOCK: Self = Self(1 << 14);
    /// Controls ublk devices, among much else.
    pub const SYS_ADMIN: Self = Self(1 << 21);

    /// Capabilities of either set.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Capabilities of both sets.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether all capabilities of `other` are in this set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Names, such as `CAP_NET_ADMIN`, ascending by number.
    pub fn names(self) -> Vec<String> {
        let numbers = (0..u64::BITS).filter(|number| self.0 >> number & 1 == 1);
        let name = |number: u32| match NAMES.get(number as usize) {
            Some(name) => format!("CAP_{name}"),
            None => format!("capability {number}"),
        };
        numbers.map(name).collect()
    }
}

impl fmt::Display for CapabilitySet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_empty() {
            true => out.write_str("none"),
            false => out.write_str(&self.names().join(" ")),
        }
    }
}

/// `struct __user_cap_header_struct` (`linux/capability.h`).
#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: i32,
}

/// `struct __user_cap_data_struct`; version 3 has two of them, the lower 32 capabilities first.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapabilityWords {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// `_LINUX_CAPABILITY_VERSION_3`.
const VERSION: u32 = 0x2008_0522;

/// The capabilities of the current thread.
pub fn thread_capabilities() -> Result<ThreadCapabilities, Errno> {
    let mut header = CapabilityHeader { version: VERSION, pid: 0 };
    let mut words = [CapabilityWords::default(); 2];
    // SAFETY: the header is initialized and names the current thread (0); version 3 writes two
    // records, which `words` holds; both outlive the call.
    unsafe {
        raw_call(libc::SYS_capget, [(&raw mut header).addr(), words.as_mut_ptr().addr(), 0, 0, 0])?
    };
    let join = |part: fn(&CapabilityWords) -> u32| {
        CapabilitySet(u64::from(part(&words[0])) | u64::from(part(&words[1])) << 32)
    };
    Ok(ThreadCapabilities {
        effective: join(|one| one.effective),
        permitted: join(|one| one.permitted),
        inheritable: join(|one| one.inheritable),
    })
}

/// Sets the capabilities of the current thread. Async-signal-safe.
///
/// A thread that has exactly these makes no call: where a service manager has dropped them, its filter of system
/// calls denies capset(2).
pub(super) fn set_thread_capabilities(sets: ThreadCapabilities) -> Result<(), Errno> {
    if thread_capabilities() == Ok(sets) {
        return Ok(());
    }
    let mut header = CapabilityHeader { version: VERSION, pid: 0 };
    #[expect(clippy::cast_possible_truncation, reason = "a half at a time")]
    let half = |shift: u32| CapabilityWords {
        effective: (sets.effective.0 >> shift) as u32,
        permitted: (sets.permitted.0 >> shift) as u32,
        inheritable: (sets.inheritable.0 >> shift) as u32,
    };
    let words = [half(0), half(32)];
    // SAFETY: as above; the kernel only reads both.
    unsafe {
        raw_call(libc::SYS_capset, [(&raw mut header).addr(), words.as_ptr().addr(), 0, 0, 0])?
    };
    Ok(())
}

/// Removes every capability but these from the bounding set of the current thread, and all from its
/// ambient set. Needs CAP_SETPCAP. Async-signal-safe.
pub(super) fn reduce_bounding_set(kept: CapabilitySet) -> Result<(), Errno> {
    clear_ambient_set()?;
    for number in 0..u64::BITS as usize {
        if kept.0 >> number & 1 == 1 {
            continue;
        }
        // SAFETY: PR_CAPBSET_DROP has a number as its argument and reads no memory.
        match unsafe {
            raw_call(libc::SYS_prctl, [libc::PR_CAPBSET_DROP as usize, number, 0, 0, 0])
        } {
            Ok(_) => {}
            // The kernel has no capability of this number, and none of a greater one.
            Err(Errno::INVAL) => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Removes all capabilities from the ambient set of the current thread. Async-signal-safe.
pub(super) fn clear_ambient_set() -> Result<(), Errno> {
    let clear_all = libc::PR_CAP_AMBIENT_CLEAR_ALL as usize;
    // SAFETY: PR_CAP_AMBIENT has numbers as its arguments and reads no memory.
    match unsafe { raw_call(libc::SYS_prctl, [libc::PR_CAP_AMBIENT as usize, clear_all, 0, 0, 0]) }
    {
        // Before Linux 4.3 there is no ambient set.
        Ok(_) | Err(Errno::INVAL) => Ok(()),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::{CapabilitySet, thread_capabilities};

    #[test]
    fn capabilities_have_the_names_of_the_manual() {
        let two = CapabilitySet::NET_ADMIN.union(CapabilitySet::SYS_ADMIN);
        assert_eq!(two.to_string(), "CAP_NET_ADMIN CAP_SYS_ADMIN");
        assert_eq!(CapabilitySet::NONE.to_string(), "none");
        assert_eq!(CapabilitySet(1 << 40).names(), ["CAP_CHECKPOINT_RESTORE"]);
        assert_eq!(CapabilitySet(1 << 50).names(), ["capability 50"]);
        assert!(two.contains(CapabilitySet::NET_ADMIN) && !CapabilitySet::NONE.contains(two));
    }

    #[test]
    fn capabilities_are_those_that_the_kernel_shows() {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let shown = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
            CapabilitySet(u64::from_str_radix(line.trim(), 16).unwrap())
        };
        let found = thread_capabilities().unwrap();
        assert_eq!(found.effective, shown("CapEff:"));
        assert_eq!(found.permitted, shown("CapPrm:"));
        assert_eq!(found.inheritable, shown("CapInh:"));
    }
}
