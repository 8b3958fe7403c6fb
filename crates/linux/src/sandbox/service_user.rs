//! The user that a server runs as, after root has opened what it needs (`--user`).

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::OnceLock;

use rustix::fs::{Gid, Uid, fchown};
use rustix::io::Errno;

use super::capabilities::{CapabilitySet, ThreadCapabilities, set_thread_capabilities};
use super::other_threads::{ThreadJobResult, run_on_other_threads};
use super::raw_call;

/// A user with its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceUser {
    /// Name.
    pub name: String,
    /// User identifier.
    pub uid: u32,
    /// Primary group identifier.
    pub gid: u32,
    /// All group identifiers.
    pub groups: Vec<u32>,
}

/// The user that this process switches to.
static INTENDED: OnceLock<ServiceUser> = OnceLock::new();

/// Buffer of a lookup in the user database; larger entries are rejected.
const ENTRY_MAX: usize = 64 << 10;
/// Groups of a user that are kept (NGROUPS_MAX of the kernel is 65536).
const GROUPS_MAX: usize = 1024;
/// PR_SET_KEEPCAPS (prctl(2)): setresuid keeps the permitted capabilities.
const KEEP_CAPABILITIES: usize = libc::PR_SET_KEEPCAPS as usize;

impl ServiceUser {
    /// Looks up `NAME` or `NAME:GROUP`; both may be numbers.
    ///
    /// # Errors
    ///
    /// The text says which of them does not exist.
    pub fn find(text: &str) -> Result<Self, String> {
        let (name, group) = match text.split_once(':') {
            Some((name, group)) => (name, Some(group)),
            None => (text, None),
        };
        let entry = find_user(name)?;
        let (name, uid, primary) = entry.ok_or_else(|| {
            format!("found no user `{name}`, expected one: `useradd --system {name}` creates it")
        })?;
        let gid = match group {
            None => primary,
            Some(group) => find_group(group)?.ok_or_else(|| {
                format!(
                    "found no group `{group}`, expected one: `groupadd --system {group}` creates it"
                )
            })?,
        };
        let groups = groups_of(&name, gid);
        Ok(Self { name, uid, gid, groups })
    }
}

/// Declares that this process switches to `user` later: files that it creates before then are given to
/// that user. Only the first call has an effect.
pub fn intend_user(user: ServiceUser) {
    let _ = INTENDED.set(user);
}

/// Identifier of the user that this process runs as, or will run as.
pub fn service_uid() -> u32 {
    INTENDED.get().map_or_else(|| rustix::process::geteuid().as_raw(), |user| user.uid)
}

/// Gives a new file to the user that this process will run as, if it still runs as root.
///
/// # Errors
///
/// The error of the system call.
pub fn give_to_service_user(file: impl AsFd) -> Result<(), Errno> {
    match intended_owner() {
        None => Ok(()),
        Some((uid, gid)) => fchown(file, Some(uid), Some(gid)),
    }
}

/// As [`give_to_service_user`], for a socket or another file with a path. A link is not followed.
///
/// # Errors
///
/// The error of the system call.
pub fn give_path_to_service_user(path: &Path) -> Result<(), Errno> {
    let no_link = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    match intended_owner() {
        None => Ok(()),
        Some((uid, gid)) => {
            rustix::fs::chownat(rustix::fs::CWD, path, Some(uid), Some(gid), no_link)
        }
    }
}

fn intended_owner() -> Option<(Uid, Gid)> {
    let user = INTENDED.get().filter(|_| rustix::process::geteuid().is_root())?;
    Some((Uid::from_raw(user.uid), Gid::from_raw(user.gid)))
}

/// Makes all threads run as `user`, with these capabilities of those they have.
///
/// # Errors
///
/// If the kernel refuses: only root may do this.
pub(super) fn switch_every_thread(
    user: &ServiceUser,
    kept: CapabilitySet,
) -> Result<ThreadJobResult, Errno> {
    let user = user.clone();
    switch_thread(&user, kept)?;
    run_on_other_threads(Box::new(move || switch_thread(&user, kept)))
}

/// Async-signal-safe: the system calls themselves change one thread, unlike the C library's functions.
fn switch_thread(user: &ServiceUser, kept: CapabilitySet) -> Result<(), Errno> {
    let (uid, gid) = (user.uid as usize, user.gid as usize);
    let groups = [user.groups.len(), user.groups.as_ptr().addr(), 0, 0, 0];
    // SAFETY: the kernel reads that many group identifiers, which live as long as the job.
    unsafe { raw_call(libc::SYS_setgroups, groups)? };
    // SAFETY: numbers only.
    unsafe { raw_call(libc::SYS_setresgid, [gid, gid, gid, 0, 0])? };
    // SAFETY: numbers only.
    unsafe { raw_call(libc::SYS_prctl, [KEEP_CAPABILITIES, 1, 0, 0, 0])? };
    // SAFETY: numbers only.
    unsafe { raw_call(libc::SYS_setresuid, [uid, uid, uid, 0, 0])? };
    set_thread_capabilities(ThreadCapabilities {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::NONE,
    })?;
    // SAFETY: numbers only.
    unsafe { raw_call(libc::SYS_prctl, [KEEP_CAPABILITIES, 0, 0, 0, 0]) }.map(drop)
}

/// Name, user identifier and primary group of a user.
fn find_user(name: &str) -> Result<Option<(String, u32, u32)>, String> {
    // SAFETY: all zeroes is a valid `passwd`: null pointers and numbers.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    let mut buffer = vec![0; ENTRY_MAX];
    let text = c_text(name)?;
    let result = match name.parse() {
        // SAFETY: the pointers are to locals that outlive the call, and the length is the buffer's.
        Ok(uid) => unsafe {
            libc::getpwuid_r(uid, &raw mut entry, buffer.as_mut_ptr(), buffer.len(), &raw mut found)
        },
        // SAFETY: as above; the name ends with a zero.
        Err(_) => unsafe {
            libc::getpwnam_r(
                text.as_ptr(),
                &raw mut entry,
                buffer.as_mut_ptr(),
                buffer.len(),
                &raw mut found,
            )
        },
    };
    check_lookup(result, "user", name)?;
    if found.is_null() {
        return Ok(None);
    }
    // SAFETY: a found entry's name points to a string in `buffer`, which lives.
    let name = unsafe { CStr::from_ptr(entry.pw_name) };
    Ok(Some((name.to_string_lossy().into_owned(), entry.pw_uid, entry.pw_gid)))
}

/// Identifier of a group, by its name or number; none if there is no such group.
///
/// # Errors
///
/// If the group database cannot be read.
pub fn find_group(name: &str) -> Result<Option<u32>, String> {
    if let Ok(gid) = name.parse() {
        return Ok(Some(gid));
    }
    // SAFETY: all zeroes is a valid `group`: null pointers and numbers.
    let mut entry: libc::group = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    let mut buffer = vec![0; ENTRY_MAX];
    let text = c_text(name)?;
    // SAFETY: the pointers are to locals that outlive the call; the name ends with a zero, and the
    // length is the buffer's.
    let result = unsafe {
        libc::getgrnam_r(
            text.as_ptr(),
            &raw mut entry,
            buffer.as_mut_ptr(),
            buffer.len(),
            &raw mut found,
        )
    };
    check_lookup(result, "group", name)?;
    Ok((!found.is_null()).then_some(entry.gr_gid))
}

/// The groups of a user; the primary one alone if the database has no list.
fn groups_of(name: &str, primary: u32) -> Vec<u32> {
    let mut groups = vec![0; GROUPS_MAX];
    let mut count = i32::try_from(GROUPS_MAX).unwrap_or(0);
    let Ok(text) = c_text(name) else { return vec![primary] };
    // SAFETY: the name ends with a zero; `groups` has room for `count` identifiers; both outlive the
    // call.
    let result =
        unsafe { libc::getgrouplist(text.as_ptr(), primary, groups.as_mut_ptr(), &raw mut count) };
    match usize::try_from(count) {
        Ok(count) if result >= 0 && count <= GROUPS_MAX => groups.truncate(count),
        _ => return vec![primary],
    }
    groups
}

fn c_text(name: &str) -> Result<CString, String> {
    CString::new(name).map_err(|_| "a name contains a zero byte, expected none".to_owned())
}

fn check_lookup(result: i32, what: &str, name: &str) -> Result<(), String> {
    match result {
        0 | libc::ENOENT | libc::ESRCH => Ok(()),
        errno => Err(format!("look up {what} `{name}`: {}", io::Error::from_raw_os_error(errno))),
    }
}

#[cfg(test)]
mod tests {
    use super::ServiceUser;

    #[test]
    fn user_is_found_by_name_and_by_number() {
        let root = ServiceUser::find("root").unwrap();
        assert_eq!((root.name.as_str(), root.uid, root.gid), ("root", 0, 0));
        assert!(root.groups.contains(&0), "{:?}", root.groups);
        assert_eq!(ServiceUser::find("0").unwrap(), root);
        assert_eq!(ServiceUser::find("root:4711").unwrap().gid, 4711);
    }

    #[test]
    fn missing_user_or_group_is_named_with_the_command_that_creates_it() {
        let refused = ServiceUser::find("no-such-user").unwrap_err();
        assert!(refused.contains("found no user `no-such-user`"), "{refused}");
        assert!(refused.contains("useradd --system no-such-user"), "{refused}");
        let refused = ServiceUser::find("root:no-such-group").unwrap_err();
        assert!(refused.contains("found no group `no-such-group`"), "{refused}");
    }
}
