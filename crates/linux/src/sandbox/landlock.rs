//! Landlock: paths and ports that a thread may still use (landlock(7)).
//!
//! The kernel allows only what a ruleset names, of the operations that the ruleset handles. What is
//! open stays usable, whatever its path.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::raw_call;

/// What may be done at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathAccess {
    /// Remove files, such as sockets at exit.
    Remove,
    /// Read files and list directories.
    Read,
    /// Read, write and control a file or a device; of a directory also create, rename and remove files
    /// below it.
    ReadWrite,
}

/// A path and what may be done there and, if it is a directory, below it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PathRule {
    /// The path.
    pub path: PathBuf,
    /// What may be done.
    pub access: PathAccess,
}

/// TCP ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetworkRules {
    /// No TCP socket may be bound to a port from now on.
    pub denies_bind: bool,
    /// No TCP connection may be opened from now on.
    pub denies_connect: bool,
}

/// A ruleset of the kernel.
#[derive(Debug)]
pub(super) struct Ruleset {
    descriptor: OwnedFd,
    /// Paths that exist and were added.
    pub(super) paths: Vec<PathRule>,
    /// Whether the kernel checks ports.
    pub(super) checks_ports: bool,
}

/// `struct landlock_ruleset_attr` (`linux/landlock.h`), of which older kernels know the beginning.
#[repr(C)]
struct RulesetAttributes {
    handled_files: u64,
    handled_network: u64,
    scoped: u64,
}

/// `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct PathBeneath {
    allowed: u64,
    parent: i32,
}

// LANDLOCK_ACCESS_FS_*.
const EXECUTE: u64 = 1;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIRECTORY: u64 = 1 << 3;
const REMOVE_DIRECTORY: u64 = 1 << 4;
const REMOVE_FILE: u64 = 1 << 5;
/// The MAKE_* operations: character device, directory, regular file, socket, FIFO, block device, link.
const MAKE_ALL: u64 = 0b111_1111 << 6;
const MAKE_REGULAR: u64 = 1 << 8;
const MAKE_SOCKET: u64 = 1 << 9;
/// Move or link between directories, since ABI 2.
const REFER: u64 = 1 << 13;
/// Since ABI 3.
const TRUNCATE: u64 = 1 << 14;
/// Since ABI 5.
const IOCTL_DEVICE: u64 = 1 << 15;
/// The operations that apply to something that is not a directory.
const OF_FILES: u64 = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE;

// LANDLOCK_ACCESS_NET_*, since ABI 4.
const BIND_TCP: u64 = 1;
const CONNECT_TCP: u64 = 1 << 1;
// LANDLOCK_SCOPE_*, since ABI 6.
const SCOPE_ABSTRACT_SOCKET: u64 = 1;
const SCOPE_SIGNAL: u64 = 1 << 1;

const CREATE_RULESET_VERSION: usize = 1;
const RULE_PATH_BENEATH: usize = 1;

/// Version of the kernel's interface.
///
/// # Errors
///
/// ENOSYS if the kernel has no Landlock, EOPNOTSUPP if it was not enabled at boot.
pub(super) fn abi_version() -> Result<u32, Errno> {
    // SAFETY: with the flag VERSION the kernel expects a null pointer and the size 0.
    let found = unsafe {
        raw_call(libc::SYS_landlock_create_ruleset, [0, 0, CREATE_RULESET_VERSION, 0, 0])?
    };
    Ok(u32::try_from(found).unwrap_or(u32::MAX))
}

/// Operations on files that an interface version handles.
const fn handled_files(abi: u32) -> u64 {
    let first = EXECUTE | WRITE_FILE | READ_FILE | READ_DIRECTORY | REMOVE_DIRECTORY | REMOVE_FILE;
    let mut handled = first | MAKE_ALL;
    if abi >= 2 {
        handled |= REFER;
    }
    if abi >= 3 {
        handled |= TRUNCATE;
    }
    if abi >= 5 {
        handled |= IOCTL_DEVICE;
    }
    handled
}

impl PathAccess {
    /// Word for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Remove => "remove",
            Self::Read => "read",
            Self::ReadWrite => "read-write",
        }
    }

    const fn operations(self) -> u64 {
        match self {
            Self::Remove => REMOVE_FILE,
            Self::Read => READ_FILE | READ_DIRECTORY,
            Self::ReadWrite => {
                READ_FILE
                    | READ_DIRECTORY
                    | WRITE_FILE
                    | REMOVE_FILE
                    | MAKE_REGULAR
                    | MAKE_SOCKET
                    | REFER
                    | TRUNCATE
                    | IOCTL_DEVICE
            }
        }
    }
}

impl Ruleset {
    /// Creates a ruleset. Paths that do not exist are left out: nothing is there to be used.
    pub(super) fn new(
        abi: u32,
        paths: &[PathRule],
        network: NetworkRules,
    ) -> Result<Self, (String, Errno)> {
        let (mut handled_network, scoped) = (0, SCOPE_ABSTRACT_SOCKET | SCOPE_SIGNAL);
        if network.denies_bind {
            handled_network |= BIND_TCP;
        }
        if network.denies_connect {
            handled_network |= CONNECT_TCP;
        }
        let attributes =
            RulesetAttributes { handled_files: handled_files(abi), handled_network, scoped };
        let known = match abi {
            ..4 => 8,
            4..6 => 16,
            6.. => size_of::<RulesetAttributes>(),
        };
        let address = (&raw const attributes).addr();
        // SAFETY: the kernel reads the first `known` bytes of the attributes, which outlive the call.
        let made =
            unsafe { raw_call(libc::SYS_landlock_create_ruleset, [address, known, 0, 0, 0]) };
        let made = made.map_err(|errno| ("create a ruleset".to_owned(), errno))?;
        // SAFETY: the call has returned a new descriptor, which nothing else owns.
        let descriptor = unsafe { OwnedFd::from_raw_fd(i32::try_from(made).unwrap_or(-1)) };
        let mut ruleset = Self { descriptor, paths: Vec::new(), checks_ports: abi >= 4 };
        for rule in paths {
            ruleset
                .add_path(abi, rule)
                .map_err(|errno| (format!("permit {}", rule.path.display()), errno))?;
        }
        Ok(ruleset)
    }

    fn add_path(&mut self, abi: u32, rule: &PathRule) -> Result<(), Errno> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let opened = match rustix::fs::open(&rule.path, flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => return Ok(()),
            opened => opened?,
        };
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&opened)?.st_mode);
        let mut allowed = rule.access.operations() & handled_files(abi);
        if kind != FileType::Directory {
            allowed &= OF_FILES;
        }
        if allowed == 0 {
            return Ok(());
        }
        let beneath = PathBeneath { allowed, parent: opened.as_raw_fd() };
        let numbers = [
            self.descriptor.as_raw_fd().unsigned_abs() as usize,
            RULE_PATH_BENEATH,
            (&raw const beneath).addr(),
            0,
            0,
        ];
        // SAFETY: the kernel reads the attributes of the rule, which outlive the call, as does the
        // descriptor that they name.
        unsafe { raw_call(libc::SYS_landlock_add_rule, numbers)? };
        self.paths.push(rule.clone());
        Ok(())
    }

    /// Restricts the current thread for good. Needs no_new_privs. Async-signal-safe.
    pub(super) fn restrict_thread(&self) -> Result<(), Errno> {
        let numbers = [self.descriptor.as_raw_fd().unsigned_abs() as usize, 0, 0, 0, 0];
        // SAFETY: the arguments are a descriptor, which lives, and no flags.
        unsafe { raw_call(libc::SYS_landlock_restrict_self, numbers) }.map(drop)
    }
}

/// Whether the rules permit this access to a path, as far as its text tells.
pub(super) fn is_permitted(rules: &[PathRule], path: &Path, access: PathAccess) -> bool {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
    // A file that does not exist is looked for where it would be.
    let resolved = absolute
        .canonicalize()
        .ok()
        .or_else(|| Some(absolute.parent()?.canonicalize().ok()?.join(absolute.file_name()?)));
    let resolved = resolved.unwrap_or(absolute);
    rules.iter().any(|rule| {
        rule.access >= access
            && resolved.starts_with(rule.path.canonicalize().unwrap_or_else(|_| rule.path.clone()))
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{IOCTL_DEVICE, PathAccess, PathRule, REFER, TRUNCATE, handled_files, is_permitted};

    #[test]
    fn operations_follow_the_interface_version() {
        assert_eq!(handled_files(1), 0x1fff);
        assert_eq!(handled_files(2), 0x1fff | REFER);
        assert_eq!(handled_files(3), 0x1fff | REFER | TRUNCATE);
        assert_eq!(handled_files(4), handled_files(3));
        assert_eq!(handled_files(7), 0xffff);
        assert_eq!(handled_files(5) & IOCTL_DEVICE, IOCTL_DEVICE);
    }

    #[test]
    fn path_is_permitted_below_a_rule_with_at_least_its_access() {
        let root = tempfile::tempdir().unwrap();
        let (disks, other) = (root.path().join("disks"), root.path().join("disks-other"));
        std::fs::create_dir(&disks).unwrap();
        std::fs::create_dir(&other).unwrap();
        std::os::unix::fs::symlink(&disks, root.path().join("link")).unwrap();
        let rules = [
            PathRule { path: disks.clone(), access: PathAccess::ReadWrite },
            PathRule { path: root.path().into(), access: PathAccess::Read },
        ];
        let permitted = |path: &Path| is_permitted(&rules, path, PathAccess::ReadWrite);
        assert!(permitted(&disks.join("a.img")) && permitted(&disks));
        assert!(permitted(&root.path().join("link/a.img")), "through a link");
        assert!(!permitted(&other.join("a.img")) && !permitted(Path::new("/etc/passwd")));
        assert!(is_permitted(&rules, &other.join("a.img"), PathAccess::Read));
    }
}
