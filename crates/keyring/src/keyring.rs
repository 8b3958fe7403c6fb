//! Keyring in a directory.

use std::path::{Path, PathBuf};

use tenmil_base::{Error, UtcTime};
use tenmil_linux::key_directory::{
    KeyDirectory, KeyDirectoryError, KeyFileAttributes, KeyPathProblem, Overwrite,
};
use tenmil_linux::runtime_directory::current_uid;
use tenmil_nvme_auth::{ChapSecret, ConfiguredPsk, KeySource, KeyText, TlsPsk};
use zeroize::Zeroizing;

use crate::{KernelPsks, Key, KeyKind, KeyName, KeyringError, protect_secrets};

/// Keys in a directory: one in a file, which has the name of the key. A handle, cheap to clone.
///
/// A key is read anew at each call, so a changed file is the key from then on.
#[derive(Clone, Debug)]
pub struct Keyring {
    directory: KeyDirectory,
}

/// File of a keyring.
#[derive(Debug)]
pub struct KeyringEntry {
    /// Name of the file.
    pub name: String,
    /// Its key, or why it is none.
    pub key: Result<Key, KeyringError>,
    /// Time of the last change, if the file can be examined.
    pub modified: Option<UtcTime>,
}

/// Longest file: the longest key has 103 characters.
pub(crate) const FILE_BYTES_MAX: usize = 255;

type Result<T, E = KeyringError> = std::result::Result<T, E>;

/// Directory that is used if none is named: `$TENMIL_KEYRING`, else `/etc/tenmil/keys` for root, else
/// `$XDG_CONFIG_HOME/tenmil/keys`, by default `~/.config/tenmil/keys`.
///
/// # Errors
///
/// If none of the variables is set, for a user other than root.
pub fn default_path() -> Result<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(path) = variable("TENMIL_KEYRING") {
        return Ok(path.into());
    }
    if current_uid() == 0 {
        return Ok("/etc/tenmil/keys".into());
    }
    let config = variable("XDG_CONFIG_HOME").map(PathBuf::from);
    let config = config.or_else(|| Some(PathBuf::from(variable("HOME")?).join(".config")));
    config.map(|config| config.join("tenmil/keys")).ok_or(KeyringError::NoDefaultPath)
}

impl Keyring {
    /// Opens the keyring in a directory, by default [`default_path`].
    ///
    /// # Errors
    ///
    /// If the directory does not exist, or others can access it.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        Self::open_with(path, KeyDirectory::open)
    }

    /// Opens a keyring; creates its directory if it does not exist.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open), or if it cannot be created.
    pub fn open_or_create(path: Option<&Path>) -> Result<Self> {
        Self::open_with(path, KeyDirectory::open_or_create)
    }

    fn open_with(
        path: Option<&Path>,
        open: impl Fn(&Path) -> Result<KeyDirectory, KeyDirectoryError>,
    ) -> Result<Self> {
        protect_secrets();
        let directory = match path {
            Some(path) => open(path),
            None => open(&default_path()?),
        };
        Ok(Self { directory: directory? })
    }

    /// Directory of the keyring.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// File of a key.
    #[must_use]
    pub fn path_of(&self, name: &KeyName) -> PathBuf {
        self.directory.path_of(name.as_str())
    }

    /// Reads a key.
    ///
    /// # Errors
    ///
    /// If there is none with this name, others can access its file, or its content is no key.
    pub fn key(&self, name: &KeyName) -> Result<Key> {
        self.key_and_attributes(name.as_str()).map(|(key, _)| key)
    }

    /// Reads a pre-shared key of TLS.
    ///
    /// # Errors
    ///
    /// As [`key`](Self::key), or if it is of the other kind.
    pub fn psk(&self, name: &KeyName) -> Result<ConfiguredPsk> {
        match self.key(name)? {
            Key::Psk(psk) => Ok(psk),
            Key::Dhchap(_) => Err(self.wrong_kind(name, KeyKind::Dhchap)),
        }
    }

    /// Reads a DH-HMAC-CHAP secret.
    ///
    /// # Errors
    ///
    /// As [`key`](Self::key), or if it is of the other kind.
    pub fn chap_secret(&self, name: &KeyName) -> Result<ChapSecret> {
        match self.key(name)? {
            Key::Dhchap(secret) => Ok(secret),
            Key::Psk(_) => Err(self.wrong_kind(name, KeyKind::Psk)),
        }
    }

    /// All files, in the order of their names; those that begin with a period are none of keys.
    ///
    /// # Errors
    ///
    /// If the directory cannot be read. A file that is no key is an entry with its error.
    pub fn entries(&self) -> Result<Vec<KeyringEntry>> {
        let names = self.directory.names()?.into_iter().filter(|name| !name.starts_with('.'));
        let entry = |name: String| {
            let read = name.parse::<KeyName>().and_then(|_| self.key_and_attributes(&name));
            let (key, modified) = match read {
                Ok((key, file)) => (Ok(key), Some(modified(file))),
                Err(error) => (Err(error), None),
            };
            KeyringEntry { name, key, modified }
        };
        Ok(names.map(entry).collect())
    }

    /// Stores a key. Its file appears complete and durable.
    ///
    /// # Errors
    ///
    /// If a key has this name and must not be replaced, or the file cannot be written.
    pub fn store(&self, name: &KeyName, key: &Key, overwrite: Overwrite) -> Result<()> {
        let mut text = Zeroizing::new(String::with_capacity(FILE_BYTES_MAX));
        text.push_str(&key.to_text());
        text.push('\n');
        Ok(self.directory.create_file(name.as_str(), text.as_bytes(), overwrite)?)
    }

    /// Removes a key. Its bytes may remain on the medium until they are overwritten.
    ///
    /// # Errors
    ///
    /// If there is none with this name, or it cannot be removed.
    pub fn remove(&self, name: &KeyName) -> Result<()> {
        match self.directory.remove_file(name.as_str())? {
            true => Ok(()),
            false => Err(self.not_found(name.as_str())),
        }
    }

    fn key_and_attributes(&self, name: &str) -> Result<(Key, KeyFileAttributes)> {
        let read = self.directory.read_file(name, FILE_BYTES_MAX);
        let (bytes, attributes) = read.map_err(|error| match error.found {
            KeyPathProblem::Missing => self.not_found(name),
            _ => error.into(),
        })?;
        let of = format!("read {}", self.directory.path_of(name).display());
        let Ok(text) = std::str::from_utf8(&bytes) else { return Err(KeyringError::NoKey { of }) };
        Ok((Key::parse(&of, text)?, attributes))
    }

    fn not_found(&self, name: &str) -> KeyringError {
        let mut known = self.directory.names().unwrap_or_default();
        known.retain(|name| name.parse::<KeyName>().is_ok());
        KeyringError::NotFound { name: name.to_owned(), directory: self.path().into(), known }
    }

    fn wrong_kind(&self, name: &KeyName, found: KeyKind) -> KeyringError {
        let expected = match found {
            KeyKind::Psk => KeyKind::Dhchap,
            KeyKind::Dhchap => KeyKind::Psk,
        };
        KeyringError::Kind { path: self.path_of(name), found, expected }
    }
}

impl KeySource for Keyring {
    fn find_key(&self, name: &str) -> Result<KeyText, Error> {
        let key = self.key(&name.parse()?)?;
        Ok(KeyText::new(key.to_text().as_str()))
    }

    fn find_kernel_psks(&self, host_nqn: &str, subsystem_nqn: &str) -> Result<Vec<TlsPsk>, Error> {
        Ok(KernelPsks::open()?.tls_psks(host_nqn, Some(subsystem_nqn))?)
    }
}

/// Keyring that is opened anew for each key: for programs that may need none, and whose keyring may be
/// created later.
#[derive(Clone, Debug, Default)]
pub struct KeyringAtPath {
    /// Directory; `None` selects [`default_path`].
    pub path: Option<PathBuf>,
}

impl KeySource for KeyringAtPath {
    fn find_key(&self, name: &str) -> Result<KeyText, Error> {
        // A key in place of a name is refused before a directory is missing.
        name.parse::<KeyName>()?;
        Keyring::open(self.path.as_deref())?.find_key(name)
    }

    fn find_kernel_psks(&self, host_nqn: &str, subsystem_nqn: &str) -> Result<Vec<TlsPsk>, Error> {
        Ok(KernelPsks::open()?.tls_psks(host_nqn, Some(subsystem_nqn))?)
    }
}

fn modified(file: KeyFileAttributes) -> UtcTime {
    UtcTime { unix_us: u64::try_from(file.modified_unix_s).unwrap_or(0).saturating_mul(1_000_000) }
}
