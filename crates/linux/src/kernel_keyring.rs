//! Keyring of the kernel (keyrings(7)): list, insert, find, read and revoke keys.
//!
//! NVMe/TCP of Linux takes its TLS keys from the keyring `.nvme`: type `psk`, description the
//! identity, payload the TLS PSK.
//!
//! # Unsafe
//!
//! `add_key` and `keyctl` receive addresses of strings with a terminating zero and of buffers with
//! their length, all of which outlive the call.

use std::ffi::{CStr, CString};
use std::fmt;
use std::io;
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

use crate::secret_memory::SecretBuffer;

/// Keyring of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelKeyring {
    serial: i32,
    name: String,
}

/// Key in a keyring of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelKey {
    /// Serial number.
    pub serial: i32,
    /// Type, such as `psk`.
    pub kind: String,
    /// Description.
    pub description: String,
}

/// An operation on a keyring of the kernel failed.
#[derive(Debug)]
pub struct KernelKeyringError {
    /// What was being done.
    pub action: String,
    /// Problem found.
    pub found: KernelKeyringProblem,
}

/// Reason for the failure.
#[derive(Debug)]
pub enum KernelKeyringProblem {
    /// The kernel was built without keyrings, or a sandbox forbids them.
    NoKeyrings,
    /// No keyring has this name, as far as this user can see.
    Missing,
    /// The kernel has no keys of this type.
    NoSuchType(String),
    /// This user may not do this.
    Denied,
    /// The key was revoked, has expired or was removed.
    Gone,
    /// Another error.
    Io(io::Error),
}

type Result<T, E = KernelKeyringError> = std::result::Result<T, E>;

/// `keyctl` operations (include/uapi/linux/keyctl.h).
const KEYCTL_JOIN_SESSION_KEYRING: libc::c_ulong = 1;
const KEYCTL_REVOKE: libc::c_ulong = 3;
const KEYCTL_DESCRIBE: libc::c_ulong = 6;
const KEYCTL_LINK: libc::c_ulong = 8;
const KEYCTL_UNLINK: libc::c_ulong = 9;
const KEYCTL_READ: libc::c_ulong = 11;
/// Keyrings of the calling thread and process. They end with them.
const KEY_SPEC_THREAD_KEYRING: i32 = -1;
const KEY_SPEC_PROCESS_KEYRING: i32 = -2;
/// Keyring of the session, which threads inherit.
const KEY_SPEC_SESSION_KEYRING: i32 = -3;
/// Keyrings that the process holds: linked in the keyring of its own session.
static HELD: Mutex<Vec<KernelKeyring>> = Mutex::new(Vec::new());
/// Longest payload that is read.
const PAYLOAD_BYTES_MAX: usize = 4096;

impl KernelKeyring {
    /// Finds the keyring with this name.
    ///
    /// # Errors
    ///
    /// If the kernel has no keyrings, or none with this name that this user can see.
    pub fn find(name: &str) -> Result<Self> {
        if let Some(held) = held_keyrings().iter().find(|held| held.name == name) {
            return Ok(held.clone());
        }
        let refuse = |found| refuse(format!("find keyring {name}"), found);
        let keys = match std::fs::read_to_string("/proc/keys") {
            Ok(keys) => keys,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(refuse(KernelKeyringProblem::NoKeyrings));
            }
            Err(error) => return Err(refuse(KernelKeyringProblem::Io(error))),
        };
        let serial = keys.lines().find_map(|line| serial_of_keyring(line, name));
        let serial = serial.ok_or_else(|| refuse(KernelKeyringProblem::Missing))?;
        Ok(Self { serial, name: name.to_owned() })
    }

    /// Keeps a link to the keyring in that of the session, which [`join_new_session`] has made. So all threads
    /// that were started since can find the keyring and read its keys after the process has switched to a user
    /// who may not even see it.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn hold(self) -> Result<()> {
        let session = KEY_SPEC_SESSION_KEYRING as libc::c_ulong;
        keyctl(KEYCTL_LINK, self.serial, session, 0).map_err(|error| {
            refuse(format!("hold keyring {}", self.name), problem(error, "keyring"))
        })?;
        held_keyrings().push(self);
        Ok(())
    }

    /// Creates a keyring that exists as long as this process, for tests.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn create_for_process(name: &str) -> Result<Self> {
        let added = add_key("keyring", name, &[], KEY_SPEC_PROCESS_KEYRING);
        let serial = added
            .map_err(|error| refuse(format!("create keyring {name}"), problem(error, "keyring")))?;
        Ok(Self { serial, name: name.to_owned() })
    }

    /// Adds a key, or replaces the payload of the one with this type and description.
    ///
    /// # Errors
    ///
    /// If the kernel refuses, for example because it has no keys of this type.
    pub fn insert(&self, kind: &str, description: &str, payload: &[u8]) -> Result<KernelKey> {
        let added = add_key(kind, description, payload, self.serial);
        let serial = added.map_err(|error| {
            refuse(
                format!("add {kind} key `{description}` to keyring {}", self.name),
                problem(error, kind),
            )
        })?;
        Ok(KernelKey { serial, kind: kind.to_owned(), description: description.to_owned() })
    }

    /// Keys in the keyring that this user can see, without keyrings in it.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn keys(&self) -> Result<Vec<KernelKey>> {
        let refuse =
            |error| refuse(format!("list keyring {}", self.name), problem(error, "keyring"));
        let serials = self.serials().map_err(refuse)?;
        let mut keys = Vec::new();
        for serial in serials {
            match describe(serial) {
                Ok(key) => keys.extend(key.filter(|key| key.kind != "keyring")),
                // It was removed meanwhile, has expired, or is hidden from this user.
                Err(Errno::NOKEY | Errno::KEYEXPIRED | Errno::KEYREVOKED | Errno::ACCESS) => {}
                Err(error) => return Err(refuse(error)),
            }
        }
        Ok(keys)
    }

    /// Finds a key by its type and description.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn find_key(&self, kind: &str, description: &str) -> Result<Option<KernelKey>> {
        let is_it = |key: &KernelKey| key.kind == kind && key.description == description;
        Ok(self.keys()?.into_iter().find(is_it))
    }

    /// Reads the payload of a key.
    ///
    /// # Errors
    ///
    /// If this user may not read it.
    pub fn read_key(&self, key: &KernelKey) -> Result<SecretBuffer> {
        let refuse = |error| {
            refuse(
                format!("read {} key `{}`", key.kind, key.description),
                problem(error, &key.kind),
            )
        };
        let mut payload =
            SecretBuffer::allocate(PAYLOAD_BYTES_MAX).map_err(|_| refuse(Errno::NOMEM))?;
        let len = self.possessed(|| read(key.serial, &mut payload)).map_err(refuse)?;
        if len > payload.len() {
            return Err(refuse(Errno::OVERFLOW));
        }
        payload.truncate(len);
        Ok(payload)
    }

    /// Revokes a key: from now on no process can use it. Connections that exist continue.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn revoke_key(&self, key: &KernelKey) -> Result<()> {
        let revoked = self.possessed(|| keyctl(KEYCTL_REVOKE, key.serial, 0, 0));
        let removed = keyctl(KEYCTL_UNLINK, key.serial, self.serial as libc::c_ulong, 0);
        // Without it in the keyring, no process finds the key.
        revoked.or(removed).map(drop).map_err(|error| {
            refuse(
                format!("revoke {} key `{}`", key.kind, key.description),
                problem(error, &key.kind),
            )
        })
    }

    /// Does something with a key while this thread possesses the keyring, and so its keys: their owner
    /// alone may only see them.
    fn possessed<T>(&self, act: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
        if held_keyrings().contains(self) {
            return act();
        }
        let thread = KEY_SPEC_THREAD_KEYRING as libc::c_ulong;
        keyctl(KEYCTL_LINK, self.serial, thread, 0)?;
        let done = act();
        let _ = keyctl(KEYCTL_UNLINK, self.serial, thread, 0);
        done
    }

    fn serials(&self) -> Result<Vec<i32>, Errno> {
        let mut bytes = vec![0; 256];
        loop {
            let len = read(self.serial, &mut bytes)?;
            if len <= bytes.len() {
                let serials = bytes[..len].chunks_exact(4);
                return Ok(serials
                    .map(|serial| i32::from_ne_bytes([serial[0], serial[1], serial[2], serial[3]]))
                    .collect());
            }
            // Keys may be added meanwhile.
            bytes = vec![0; len * 2];
        }
    }
}

/// Gives this thread, and those that it starts from now on, a keyring of a session of their own, so that what
/// they hold is not held by the processes of the session before.
///
/// # Errors
///
/// If the kernel refuses.
pub fn join_new_session() -> Result<()> {
    keyctl(KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0)
        .map(drop)
        .map_err(|error| refuse("join a new session".to_owned(), problem(error, "keyring")))
}

fn held_keyrings() -> std::sync::MutexGuard<'static, Vec<KernelKeyring>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serial number in a line of `/proc/keys`, if it is that of a keyring with this name:
///
/// ```text
/// 2d01ebbb I--Q---     2 perm 1f3f0000     0     0 keyring   .nvme: 3
/// ```
fn serial_of_keyring(line: &str, name: &str) -> Option<i32> {
    let mut words = line.split_whitespace();
    let serial = u32::from_str_radix(words.next()?, 16).ok()?;
    let is_keyring = words.nth(6) == Some("keyring");
    let found = words.next()?.strip_suffix(':')?;
    (is_keyring && found == name).then(|| serial.cast_signed())
}

/// Describes a key; `None` if the description is not of the documented form.
fn describe(serial: i32) -> Result<Option<KernelKey>, Errno> {
    let mut bytes = vec![0; 1024];
    let len = keyctl(KEYCTL_DESCRIBE, serial, bytes.as_mut_ptr() as libc::c_ulong, bytes.len())?;
    if len > bytes.len() {
        return Ok(None);
    }
    let text = CStr::from_bytes_until_nul(&bytes).map(CStr::to_string_lossy).unwrap_or_default();
    // type;uid;gid;permissions;description, and only the last may contain a semicolon.
    let mut fields = text.splitn(5, ';');
    let (kind, description) = (fields.next(), fields.nth(3));
    Ok(kind.zip(description).map(|(kind, description)| KernelKey {
        serial,
        kind: kind.to_owned(),
        description: description.to_owned(),
    }))
}

/// Reads a payload, of a keyring its serial numbers. Returns its length, which may exceed the buffer.
fn read(serial: i32, bytes: &mut [u8]) -> Result<usize, Errno> {
    keyctl(KEYCTL_READ, serial, bytes.as_mut_ptr() as libc::c_ulong, bytes.len())
}

fn add_key(kind: &str, description: &str, payload: &[u8], keyring: i32) -> Result<i32, Errno> {
    let kind = CString::new(kind).map_err(|_| Errno::INVAL)?;
    let description = CString::new(description).map_err(|_| Errno::INVAL)?;
    // SAFETY: both strings end with a zero and the payload has the given length; all outlive the call,
    // which reads them only.
    let serial = unsafe {
        libc::syscall(
            libc::SYS_add_key,
            kind.as_ptr(),
            description.as_ptr(),
            payload.as_ptr(),
            payload.len(),
            keyring,
        )
    };
    match i32::try_from(serial) {
        Ok(serial) if serial > 0 => Ok(serial),
        _ => Err(last_error()),
    }
}

/// Calls `keyctl`. If `argument` is an address, it is that of a buffer with `len` bytes that outlives
/// the call.
fn keyctl(
    operation: libc::c_ulong,
    serial: i32,
    argument: libc::c_ulong,
    len: usize,
) -> Result<usize, Errno> {
    // SAFETY: the callers of this module pass the address and length of a buffer that they have
    // borrowed exclusively, or a number with an operation that accesses no memory.
    let result = unsafe { libc::syscall(libc::SYS_keyctl, operation, serial, argument, len, 0) };
    usize::try_from(result).map_err(|_| last_error())
}

fn last_error() -> Errno {
    let error = io::Error::last_os_error();
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

fn problem(error: Errno, kind: &str) -> KernelKeyringProblem {
    match error {
        Errno::NOSYS => KernelKeyringProblem::NoKeyrings,
        Errno::NODEV => KernelKeyringProblem::NoSuchType(kind.to_owned()),
        Errno::ACCESS | Errno::PERM => KernelKeyringProblem::Denied,
        Errno::NOKEY | Errno::KEYEXPIRED | Errno::KEYREVOKED => KernelKeyringProblem::Gone,
        error => KernelKeyringProblem::Io(error.into()),
    }
}

fn refuse(action: String, found: KernelKeyringProblem) -> KernelKeyringError {
    KernelKeyringError { action, found }
}

impl KernelKeyringError {
    /// Step that removes the problem, if one is known.
    #[must_use]
    pub fn fix(&self) -> Option<&'static str> {
        match self.found {
            KernelKeyringProblem::NoKeyrings => {
                Some("use a kernel with CONFIG_KEYS, outside of a container that forbids `keyctl`")
            }
            KernelKeyringProblem::Missing | KernelKeyringProblem::NoSuchType(_) => Some(
                "as root: `modprobe nvme_tcp`, or nvmet_tcp for a target, of Linux 6.7 or later with \
                 CONFIG_NVME_TCP_TLS",
            ),
            KernelKeyringProblem::Denied => Some("run as root"),
            KernelKeyringProblem::Gone | KernelKeyringProblem::Io(_) => None,
        }
    }
}

impl fmt::Display for KernelKeyringError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: ", self.action)?;
        match &self.found {
            KernelKeyringProblem::NoKeyrings => {
                out.write_str("the kernel has no keyrings, expected them")
            }
            KernelKeyringProblem::Missing => {
                out.write_str("the kernel has none that this user can see, expected one")
            }
            KernelKeyringProblem::NoSuchType(kind) => {
                write!(out, "the kernel has no keys of type {kind}, expected it to")
            }
            KernelKeyringProblem::Denied => out.write_str("this user may not, expected root"),
            KernelKeyringProblem::Gone => {
                out.write_str("it was revoked, has expired or was removed, expected a valid key")
            }
            KernelKeyringProblem::Io(error) => write!(out, "{error}"),
        }
    }
}

impl std::error::Error for KernelKeyringError {}

#[cfg(test)]
mod tests {
    use super::{KernelKeyring, KernelKeyringProblem, serial_of_keyring};

    /// Operation that sets the rights of a key, and all rights for possessors only (keyctl.h, keyrings(7)).
    const KEYCTL_SETPERM: libc::c_ulong = 5;
    const POSSESSOR_ALL: libc::c_ulong = 0x3f00_0000;

    /// A keyring of this process; `None` where the kernel has none.
    fn process_keyring(name: &str) -> Option<KernelKeyring> {
        KernelKeyring::create_for_process(name).inspect_err(|why| println!("skipped: {why}")).ok()
    }

    #[test]
    fn inserted_key_is_listed_found_read_and_revoked() {
        let Some(keyring) = process_keyring("tenmil-insert") else { return };
        assert_eq!(keyring.keys().unwrap(), []);
        // `user` is a type that each kernel has. A description may contain spaces and semicolons.
        let identity = "NVMe1R01 nqn.host nqn.sub;x dGVzdA==";
        let first = keyring.insert("user", identity, b"payload").unwrap();
        let other = keyring.insert("user", "another", b"2").unwrap();
        let mut keys = keyring.keys().unwrap();
        keys.sort_by_key(|key| key.serial != first.serial);
        assert_eq!(keys, [first.clone(), other]);
        assert_eq!(keyring.find_key("user", identity).unwrap(), Some(first.clone()));
        assert_eq!(keyring.find_key("psk", identity).unwrap(), None);
        assert_eq!(keyring.find_key("user", "NVMe1R01").unwrap(), None, "no prefix");
        assert_eq!(&*keyring.read_key(&first).unwrap(), b"payload");
        keyring.insert("user", identity, b"changed").unwrap();
        assert_eq!(&*keyring.read_key(&first).unwrap(), b"changed");
        keyring.revoke_key(&first).unwrap();
        assert!(keyring.read_key(&first).is_err());
        assert_eq!(keyring.find_key("user", identity).unwrap(), None);
    }

    #[test]
    fn more_keys_than_fit_into_the_first_buffer_are_listed() {
        let Some(keyring) = process_keyring("tenmil-many") else { return };
        for index in 0..100 {
            keyring.insert("user", &format!("key {index}"), b"1").unwrap();
        }
        assert_eq!(keyring.keys().unwrap().len(), 100);
    }

    #[test]
    fn unknown_type_and_missing_keyring_are_refused_with_the_module_to_load() {
        let Some(keyring) = process_keyring("tenmil-type") else { return };
        let refused = keyring.insert("tenmil", "a", b"1").unwrap_err();
        assert!(refused.to_string().contains("no keys of type tenmil"), "{refused}");
        assert!(refused.fix().unwrap().contains("modprobe nvme_tcp"));
        let refused = KernelKeyring::find(".tenmil-none").unwrap_err();
        assert!(matches!(refused.found, KernelKeyringProblem::Missing), "{refused:?}");
        let text = refused.to_string();
        assert!(text.contains("find keyring .tenmil-none: the kernel has none"), "{text}");
    }

    #[test]
    fn held_keyring_is_found_and_read_by_threads_started_later() {
        // Only this thread possesses it, and other users of the key have no right to it.
        let name = "tenmil-held";
        let added = super::add_key("keyring", name, &[], super::KEY_SPEC_THREAD_KEYRING);
        let Ok(serial) = added else { return println!("skipped: no keyrings") };
        let keyring = KernelKeyring { serial, name: name.to_owned() };
        let key = keyring.insert("user", "held", b"payload").unwrap();
        for serial in [key.serial, serial] {
            super::keyctl(KEYCTL_SETPERM, serial, POSSESSOR_ALL, 0).unwrap();
        }
        let read = move || {
            let found = KernelKeyring::find(name).ok()?;
            let found_key = found.find_key("user", "held").ok()??;
            Some(found.read_key(&found_key).ok()?.to_vec())
        };
        super::join_new_session().unwrap();
        assert_eq!(std::thread::spawn(read).join().unwrap(), None, "it is not held yet");
        keyring.hold().unwrap();
        assert_eq!(std::thread::spawn(read).join().unwrap(), Some(b"payload".to_vec()));
    }

    #[test]
    fn keyring_is_found_by_its_whole_name() {
        let line = "ad01ebbb I------     1 perm 1f030000     0     0 keyring   .nvme: empty";
        assert_eq!(serial_of_keyring(line, ".nvme"), Some(0xad01_ebbb_u32.cast_signed()));
        assert_eq!(serial_of_keyring(line, ".nvm"), None);
        assert_eq!(serial_of_keyring(&line.replace("keyring", "psk    "), ".nvme"), None);
        for cut in 0..line.len() - 6 {
            serial_of_keyring(&line[..cut], ".nvme");
        }
    }
}
