//! What was found before anything was changed, in a file that outlives a crash.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/tenmil/PID-SEED.frequency      0600, locked while its process lives
//!     0 800000 3600000 balance_performance          processor, lower and upper kHz, hint
//!     4 800000 3600000 -                            or no hint
//! ```
//!
//! The lock says whether the process lives, as no number of a process can: those are used again,
//! and mean nothing in another container.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::domain::{Domain, State};
use super::{Files, FrequencyError};
use crate::Cores;
use crate::random::random_seed;
use crate::runtime_directory::RuntimeDirectory;

/// The file of a living process: ours.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    _locked: File,
}

/// What was done for processes that are gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Processors that run as they did before.
    pub cores: Cores,
    /// What could not be done.
    pub errors: Vec<FrequencyError>,
}

/// A file of a process, and whether that process is gone: then it is locked, by us.
struct Found {
    path: PathBuf,
    text: String,
    abandoned: Option<File>,
}

const SUFFIX: &str = "frequency";
const NO_HINT: &str = "-";

impl Journal {
    /// Writes down what was found. The file has its name only when it is locked and complete, so
    /// nobody takes it for one that was left behind.
    pub(super) fn write(
        directory: &RuntimeDirectory,
        domains: &[Domain],
    ) -> Result<Self, (PathBuf, Errno)> {
        let name = format!("{}-{:016x}", std::process::id(), random_seed());
        let path = directory.path().join(&name).with_extension(SUFFIX);
        let draft = directory.path().join(name);
        let locked = write_locked(&draft, &lines(domains))
            .and_then(|locked| std::fs::rename(&draft, &path).map(|()| locked));
        match locked {
            Ok(locked) => Ok(Self { path, _locked: locked }),
            Err(error) => {
                let _ = std::fs::remove_file(draft);
                Err((path, Errno::from_io_error(&error).unwrap_or(Errno::IO)))
            }
        }
    }

    /// As [`alone`], where this file is.
    pub(super) fn alone(&self) -> Option<File> {
        alone(self.path.parent()?).ok()
    }

    /// Everything has been put back.
    pub(super) fn done(&self) {
        // Gone already if this is the second time.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Puts back what processes that are gone have changed. To be called once at every start, also by a
/// process that changes nothing itself.
pub fn recover(files: &impl Files, directory: &RuntimeDirectory) -> Recovered {
    let mut recovered = Recovered::default();
    let _alone = match alone(directory.path()) {
        Ok(locked) => locked,
        Err(found) => {
            let (path, found) = (directory.path().to_owned(), found.to_string());
            recovered.errors.push(FrequencyError::Journal { path, found });
            return recovered;
        }
    };
    let mut cores = Vec::new();
    for found in all(directory).into_iter().filter(|found| found.abandoned.is_some()) {
        let mut refused = false;
        for line in found.text.lines() {
            let Some((core, state)) = parse(line) else {
                let (path, found) = (found.path.clone(), format!("line is '{line}'"));
                recovered.errors.push(FrequencyError::Journal { path, found });
                continue;
            };
            match state.put_back(files, core) {
                // Switched off since; it begins anew when it comes back.
                None if State::read(files, core).is_none() => {}
                None => cores.push(core),
                Some(error) => {
                    recovered.errors.push(error);
                    refused = true;
                }
            }
        }
        if !refused {
            let _ = std::fs::remove_file(&found.path);
        }
    }
    recovered.cores = cores.into_iter().collect();
    recovered
}

/// Waits until nobody else takes charge of processors or puts them back, and keeps others from it
/// while the answer lives.
pub(super) fn alone(directory: &Path) -> Result<File, Errno> {
    let locked =
        File::open(directory).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    while let Err(errno) = flock(&locked, FlockOperation::LockExclusive) {
        if errno != Errno::INTR {
            return Err(errno);
        }
    }
    Ok(locked)
}

/// The processors that living processes have in charge, and their files.
pub(super) fn held(directory: &RuntimeDirectory) -> Vec<(PathBuf, Cores)> {
    let living = all(directory).into_iter().filter(|found| found.abandoned.is_none());
    let cores = |text: &str| text.lines().filter_map(parse).map(|(core, _)| core).collect();
    living.map(|found| (found.path, cores(&found.text))).collect()
}

fn all(directory: &RuntimeDirectory) -> Vec<Found> {
    let entries = std::fs::read_dir(directory.path()).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let ours = |path: &PathBuf| path.extension().is_some_and(|extension| extension == SUFFIX);
    let mut found: Vec<Found> = paths.filter(ours).filter_map(look).collect();
    found.sort_by(|one, other| one.path.cmp(&other.path));
    found
}

fn look(path: PathBuf) -> Option<Found> {
    let mut file = File::open(&path).ok()?;
    let abandoned = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
    // Somebody else may have put it back and taken it away between our opening and locking it.
    if file.metadata().ok()?.nlink() == 0 {
        return None;
    }
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    Some(Found { path, text, abandoned: abandoned.then_some(file) })
}

fn write_locked(path: &Path, text: &str) -> std::io::Result<File> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    file.write_all(text.as_bytes())?;
    Ok(file)
}

fn lines(domains: &[Domain]) -> String {
    let line = |domain: &Domain| {
        let State { min_khz, max_khz, preference } = domain.found();
        let hint = preference.as_deref().unwrap_or(NO_HINT);
        format!("{} {min_khz} {max_khz} {hint}\n", domain.core())
    };
    domains.iter().map(line).collect()
}

/// Reads a line as it was written; nothing else is believed, since it ends in the kernel's files.
fn parse(line: &str) -> Option<(u32, State)> {
    let mut fields = line.split(' ');
    let core = Cores::parse(fields.next()?).ok().filter(|cores| cores.len() == 1)?.iter().next()?;
    let mut khz = || fields.next()?.parse::<u64>().ok();
    let (min_khz, max_khz) = (khz()?, khz()?);
    let hint = fields.next()?;
    let plain = hint.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let preference = match hint {
        NO_HINT => None,
        hint if plain => Some(hint.to_owned()),
        _ => return None,
    };
    (min_khz <= max_khz && fields.next().is_none())
        .then_some((core, State { min_khz, max_khz, preference }))
}
