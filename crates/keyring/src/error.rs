//! Errors of keyrings. They hold nothing of a key.

use std::fmt;
use std::io;
use std::path::PathBuf;

use tenmil_base::Error;
use tenmil_base::text::escape;
use tenmil_linux::kernel_keyring::KernelKeyringError;
use tenmil_linux::key_directory::{KeyDirectoryError, KeyPathProblem};
use tenmil_nvme_auth::{KERNEL_KEYRING, KeyError};

use crate::KeyKind;

/// An operation on a keyring failed.
#[derive(Debug)]
pub enum KeyringError {
    /// No directory is named, and none follows from the environment.
    NoDefaultPath,
    /// The directory or a file was rejected.
    Directory(KeyDirectoryError),
    /// A name is not permitted.
    Name {
        /// What was found.
        found: String,
    },
    /// The keyring has no key with this name.
    NotFound {
        /// The name.
        name: String,
        /// Directory of the keyring.
        directory: PathBuf,
        /// Names of its keys.
        known: Vec<String>,
    },
    /// A text is no key of a known kind.
    NoKey {
        /// What the text is.
        of: String,
    },
    /// A text has more or fewer lines than one.
    Lines {
        /// What the text is.
        of: String,
        /// Number of lines.
        found: usize,
    },
    /// A key is malformed.
    Syntax {
        /// What the text is.
        of: String,
        /// Problem found.
        why: KeyError,
    },
    /// A key is of another kind.
    Kind {
        /// Path of the key.
        path: PathBuf,
        /// Kind of the key.
        found: KeyKind,
        /// Expected kind.
        expected: KeyKind,
    },
    /// Input was not read.
    Input {
        /// What was read.
        of: String,
        /// Error of the kernel.
        why: io::Error,
    },
    /// The kernel supplies no random numbers.
    Random(io::Error),
    /// The keyring of the kernel.
    Kernel(KernelKeyringError),
    /// The keyring of the kernel has no TLS PSK for a host, and a subsystem if one is meant.
    NoKernelPsk {
        /// Host NQN.
        host_nqn: String,
        /// Subsystem NQN.
        subsystem_nqn: String,
    },
    /// A TLS PSK in the keyring of the kernel has another length than its identity requires.
    KernelPskLength {
        /// Identity of the key.
        identity: String,
        /// Its length.
        found_bytes: usize,
        /// The length that the hash of the identity has.
        expected_bytes: usize,
    },
}

/// Names of an error message; the others are counted.
const NAMES_SHOWN: usize = 8;

impl KeyringError {
    /// Next step for the user, if one is known.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NoDefaultPath => Some("name it with --keyring or TENMIL_KEYRING".to_owned()),
            Self::Directory(KeyDirectoryError { path, found: KeyPathProblem::Missing, .. }) => {
                let path = path.display();
                Some(format!("`tenmil key generate psk NAME --keyring {path}` creates it"))
            }
            Self::Directory(error) => error.fix(),
            Self::Name { .. } => Some(
                "store the key with `tenmil key import NAME < FILE` and use that name; a key on a \
                 command line or in a URI is visible to all users of the machine"
                    .to_owned(),
            ),
            Self::NotFound { name, directory, .. } => Some(format!(
                "store it with `tenmil key import {name} --keyring {} < FILE`, or create one with \
                 `tenmil key generate`",
                directory.display()
            )),
            Self::Kind { expected, .. } => {
                Some(format!("create one with `tenmil key generate {} NAME`", expected.name()))
            }
            Self::NoKey { .. } | Self::Lines { .. } => {
                Some("`nvme gen-tls-key` and `nvme gen-dhchap-key` print such keys".to_owned())
            }
            Self::Kernel(error) => error.fix().map(str::to_owned),
            Self::NoKernelPsk { host_nqn, subsystem_nqn } => Some(format!(
                "`tenmil key insert NAME --hostnqn {host_nqn} --subsysnqn {subsystem_nqn}`; `tenmil key \
                 list --kernel` shows what it has"
            )),
            Self::KernelPskLength { .. } => Some(
                "insert it again with `tenmil key insert`, or `nvme check-tls-key --insert`"
                    .to_owned(),
            ),
            Self::Syntax { .. } | Self::Input { .. } | Self::Random(_) => None,
        }
    }

    const fn is_environment(&self) -> bool {
        match self {
            Self::Directory(error) => !matches!(error.found, KeyPathProblem::Exists),
            Self::NoDefaultPath | Self::Input { .. } | Self::Random(_) | Self::Kernel(_) => true,
            Self::NoKernelPsk { .. } | Self::KernelPskLength { .. } => true,
            Self::Name { .. }
            | Self::NotFound { .. }
            | Self::NoKey { .. }
            | Self::Lines { .. }
            | Self::Syntax { .. }
            | Self::Kind { .. } => false,
        }
    }
}

impl fmt::Display for KeyringError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDefaultPath => out.write_str(
                "open keyring: found none of TENMIL_KEYRING, XDG_CONFIG_HOME and HOME, expected one",
            ),
            Self::Directory(error) => write!(out, "keyring: {error}"),
            Self::Name { found } => write!(
                out,
                "name of a key: found {found}, expected 1 to 64 letters, digits, '.', '_' and '-', \
                 the first a letter or a digit"
            ),
            Self::NotFound { name, directory, known } => {
                let directory = directory.display();
                write!(out, "key `{name}`: keyring {directory} has none of that name, expected ")?;
                match known.as_slice() {
                    [] => out.write_str("one, and it is empty"),
                    [one] => write!(out, "{one}"),
                    all if all.len() <= NAMES_SHOWN => write!(out, "one of {}", all.join(", ")),
                    all => {
                        let shown = all[..NAMES_SHOWN].join(", ");
                        write!(out, "one of {shown} and {} more", all.len() - NAMES_SHOWN)
                    }
                }
            }
            Self::NoKey { of } => {
                write!(out, "{of}: found another text, expected NVMeTLSkey-1:… or DHHC-1:…")
            }
            Self::Lines { of, found } => {
                write!(out, "{of}: found {found} lines, expected one with a key")
            }
            Self::Syntax { of, why } => write!(out, "{of}: {why}"),
            Self::Kind { path, found, expected } => {
                write!(out, "read {}: found a {found}, expected a {expected}", path.display())
            }
            Self::Input { of, why } => write!(out, "{of}: {why}"),
            Self::Random(why) => write!(out, "generate key: random numbers of the kernel: {why}"),
            Self::Kernel(error) => write!(out, "{error}"),
            Self::NoKernelPsk { host_nqn, subsystem_nqn } => write!(
                out,
                "find TLS PSK: keyring {KERNEL_KEYRING} of the kernel has none of host {host_nqn} and \
                 subsystem {subsystem_nqn}, expected one"
            ),
            Self::KernelPskLength { identity, found_bytes, expected_bytes } => write!(
                out,
                "read TLS PSK `{}` of keyring {KERNEL_KEYRING} of the kernel: found {found_bytes} bytes, \
                 expected {expected_bytes}",
                escape(identity)
            ),
        }
    }
}

impl std::error::Error for KeyringError {}

impl From<KeyDirectoryError> for KeyringError {
    fn from(error: KeyDirectoryError) -> Self {
        Self::Directory(error)
    }
}

impl From<KernelKeyringError> for KeyringError {
    fn from(error: KernelKeyringError) -> Self {
        Self::Kernel(error)
    }
}

impl From<KeyringError> for Error {
    fn from(error: KeyringError) -> Self {
        let hint = error.hint();
        let made = match error.is_environment() {
            true => Self::environment(&error),
            false => Self::usage(&error),
        };
        Self { hint, ..made }
    }
}
