//! A number that identifies this machine, for as long as the machine is installed.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::kernel_files::KernelFiles;
use crate::owned_directory::OwnedDirectory;

/// Number of a machine and where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineKey {
    /// The number.
    pub value: u128,
    /// Its source.
    pub source: MachineKeySource,
}

/// Source of a machine's number, the first of these that there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineKeySource {
    /// `/etc/machine-id` (machine-id(5)).
    MachineId,
    /// UUID that the manufacturer gave the machine, which root can read (SMBIOS 7.2.1).
    Firmware,
    /// A random number kept in this file.
    File(PathBuf),
    /// A random number of this process: the file could not be kept, for this reason.
    Process(String),
}

/// Name of the kept file.
const FILE: &str = "machine-key";
/// Attempts to lock it, and the pause between them: two seconds.
const LOCK_ATTEMPTS: u32 = 200;
const LOCK_PAUSE: Duration = Duration::from_millis(10);
/// UUIDs that manufacturers give to all of their machines.
const FIRMWARE_PLACEHOLDERS: [u128; 3] =
    [0x03000200_0400_0500_0006_000700080009, 0x00020003_0004_0005_0006_000700080009, 1];

impl MachineKey {
    /// The number of this machine, the same for as long as the process lives.
    pub fn of_this_machine() -> &'static Self {
        static KEY: OnceLock<MachineKey> = OnceLock::new();
        KEY.get_or_init(|| {
            Self::from_sources(&KernelFiles::live_system(), state_directory().as_deref())
        })
    }

    fn from_sources(machine: &KernelFiles, directory: Option<&Path>) -> Self {
        if let Some(value) = parse_key(machine.read_trimmed("etc/machine-id").as_deref()) {
            return Self { value, source: MachineKeySource::MachineId };
        }
        let firmware = parse_key(machine.read_trimmed("sys/class/dmi/id/product_uuid").as_deref());
        if let Some(value) = firmware.filter(|value| !FIRMWARE_PLACEHOLDERS.contains(value)) {
            return Self { value, source: MachineKeySource::Firmware };
        }
        let kept = match directory {
            Some(directory) => stored_or_new_key(directory)
                .map_err(|error| format!("keep {}: {error}", directory.join(FILE).display())),
            None => Err("found neither STATE_DIRECTORY nor HOME, expected one of them".into()),
        };
        match kept {
            Ok((value, path)) => Self { value, source: MachineKeySource::File(path) },
            Err(why) => Self { value: random_key(), source: MachineKeySource::Process(why) },
        }
    }
}

/// The number in the file, which is made if it is not there.
fn stored_or_new_key(directory: &Path) -> std::io::Result<(u128, PathBuf)> {
    if let Some(parent) = directory.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let own = OwnedDirectory::open(directory)?;
    // Of two processes that make it at the same time, one waits for the other.
    let lock = own.lock_file("machine-key.lock")?;
    try_lock_repeatedly(&lock, LOCK_ATTEMPTS)?;
    let path = directory.join(FILE);
    if let Some(bytes) = own.read_file(FILE)? {
        let value = parse_key(std::str::from_utf8(&bytes).ok());
        let refuse = || std::io::Error::other("found no number, expected 32 hexadecimal digits");
        return Ok((value.ok_or_else(refuse)?, path));
    }
    let value = random_key();
    let new = format!("{FILE}.new");
    own.write_file(&new, format!("{value:032x}\n").as_bytes())?;
    own.sync_file(&new)?;
    own.rename_file(&new, FILE)?;
    own.sync_entries()?;
    Ok((value, path))
}

fn try_lock_repeatedly(file: &File, attempts: u32) -> std::io::Result<()> {
    for _ in 1..attempts {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(LOCK_PAUSE),
            done => return Ok(done?),
        }
    }
    Ok(flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

fn random_key() -> u128 {
    (u128::from(crate::random_seed()) << 64 | u128::from(crate::random_seed())).max(1)
}

/// A number of 32 hexadecimal digits with or without dashes, other than none and all.
fn parse_key(text: Option<&str>) -> Option<u128> {
    let digits: String = text?.trim().chars().filter(|one| *one != '-').collect();
    let value = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32);
    value.filter(|value| *value != 0 && *value != u128::MAX)
}

/// `STATE_DIRECTORY` (systemd.exec(5)), `/var/lib/tenmil` for root, and the user's state directory (XDG base
/// directories) for others.
fn state_directory() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(given) = variable("STATE_DIRECTORY") {
        // Several are separated by colons.
        return given.to_str()?.split(':').next().map(PathBuf::from);
    }
    if rustix::process::geteuid().is_root() {
        return Some("/var/lib/tenmil".into());
    }
    let state = variable("XDG_STATE_HOME").map(PathBuf::from);
    let state = state.or_else(|| Some(PathBuf::from(variable("HOME")?).join(".local/state")));
    state.map(|state| state.join("tenmil"))
}

impl fmt::Display for MachineKeySource {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MachineId => out.write_str("/etc/machine-id"),
            Self::Firmware => {
                out.write_str("the UUID of the firmware, as there is no /etc/machine-id")
            }
            Self::File(path) => {
                write!(out, "{}, as there is no /etc/machine-id", path.display())
            }
            Self::Process(why) => write!(
                out,
                "a random number of this process, as there is no /etc/machine-id: {why}; the next process \
                 is another host; fix: `systemd-machine-id-setup`"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{MachineKey, MachineKeySource};
    use crate::kernel_files::tests::fake_kernel_files;

    const ID: &str = "0123456789abcdef0123456789abcdef";
    const UUID: &str = "01234567-89AB-CDEF-0123-456789ABCDEE\n";
    const DMI: &str = "sys/class/dmi/id/product_uuid";

    #[test]
    fn machines_without_machine_id_get_distinct_stable_keys() {
        let places = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let (_root, machine) = fake_kernel_files(&[]);
        let of = |at: usize| {
            MachineKey::from_sources(&machine, Some(&places[at].path().join("state/tenmil")))
        };
        let [first, other] = [of(0), of(1)];
        assert_ne!(first.value, other.value);
        let MachineKeySource::File(path) = &first.source else { panic!("{first:?}") };
        assert!(path.starts_with(places[0].path()));
        assert_eq!((of(0), of(1)), (first, other));
    }

    #[test]
    fn first_source_that_distinguishes_machines_is_used() {
        let place = tempfile::tempdir().unwrap();
        let state = place.path().join("tenmil");
        for (files, expected) in [
            (&[("etc/machine-id", ID), (DMI, UUID)][..], MachineKeySource::MachineId),
            (&[("etc/machine-id", "uninitialized\n"), (DMI, UUID)], MachineKeySource::Firmware),
            (&[("etc/machine-id", ""), (DMI, UUID)], MachineKeySource::Firmware),
            (
                &[(DMI, "03000200-0400-0500-0006-000700080009")],
                MachineKeySource::File(state.join("machine-key")),
            ),
            (
                &[(DMI, "ffffffff-ffff-ffff-ffff-ffffffffffff")],
                MachineKeySource::File(state.join("machine-key")),
            ),
        ] {
            let (_root, machine) = fake_kernel_files(files);
            let key = MachineKey::from_sources(&machine, Some(&state));
            assert_eq!(key.source, expected, "{files:?}");
            assert_ne!(key.value, 0);
        }
    }

    #[test]
    fn unstorable_key_is_valid_for_this_process_only() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("file");
        std::fs::write(&file, "").unwrap();
        let (_root, machine) = fake_kernel_files(&[]);
        let of = |directory| MachineKey::from_sources(&machine, directory);
        let [one, two] = [of(Some(file.as_path())), of(None)];
        assert_ne!(one.value, two.value);
        assert!(
            one.source
                .to_string()
                .contains(&format!("keep {}", file.join("machine-key").display()))
        );
        assert!(two.source.to_string().contains("found neither STATE_DIRECTORY nor HOME"));
        // Other contents of the file are not parsed as a number, and not replaced.
        let state = place.path().join("tenmil");
        std::fs::create_dir(&state).unwrap();
        std::fs::write(state.join("machine-key"), "0").unwrap();
        let key = of(Some(&state));
        assert!(key.source.to_string().contains("expected 32 hexadecimal digits"), "{key:?}");
        assert_eq!(std::fs::read(state.join("machine-key")).unwrap(), b"0");
    }
}
