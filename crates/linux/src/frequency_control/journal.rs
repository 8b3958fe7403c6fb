//! Journal of the frequency values found, which survives a crash.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/tenmil/PID-SEED.frequency      0600, locked while its process lives
//!     0 800000 3600000 balance_performance          CPU, lower and upper kHz, hint
//!     4 800000 3600000 -                            or no hint
//! ```
//!
//! The lock shows whether the process lives. A process identifier would not: identifiers are
//! reused, and are meaningless in another container.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::cpufreq_policy::{CpufreqPolicy, CpufreqState};
use super::{CpufreqFiles, FrequencyError};
use crate::CpuList;
use crate::random::random_seed;
use crate::runtime_directory::RuntimeDirectory;

/// Journal of this process.
#[derive(Debug)]
pub(super) struct FrequencyJournal {
    path: PathBuf,
    _locked: File,
}

/// Result of the recovery for exited processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Restored CPUs.
    pub cores: CpuList,
    /// Errors.
    pub errors: Vec<FrequencyError>,
}

/// Journal of a process. If the process has exited, the journal is locked by us.
struct JournalEntry {
    path: PathBuf,
    text: String,
    stale_lock: Option<File>,
}

const SUFFIX: &str = "frequency";
const NO_HINT: &str = "-";

impl FrequencyJournal {
    /// Writes the values found. The file gets its name only when it is locked and complete, so it
    /// is never mistaken for that of an exited process.
    pub(super) fn write_found_values(
        directory: &RuntimeDirectory,
        domains: &[CpufreqPolicy],
    ) -> Result<Self, (PathBuf, Errno)> {
        let name = format!("{}-{:016x}", std::process::id(), random_seed());
        let path = directory.path().join(&name).with_extension(SUFFIX);
        let draft = directory.path().join(name);
        let locked = write_locked(&draft, &journal_lines(domains))
            .and_then(|locked| std::fs::rename(&draft, &path).map(|()| locked));
        match locked {
            Ok(locked) => Ok(Self { path, _locked: locked }),
            Err(error) => {
                let _ = std::fs::remove_file(draft);
                Err((path, Errno::from_io_error(&error).unwrap_or(Errno::IO)))
            }
        }
    }

    /// As [`lock_frequency_control`], for the directory of this journal.
    pub(super) fn lock_directory(&self) -> Option<File> {
        lock_frequency_control(self.path.parent()?).ok()
    }

    /// Deletes the journal: everything has been restored.
    pub(super) fn delete_journal(&self) {
        // A second call finds the file deleted.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Restores what exited processes have changed. Call once at every start, even in processes that
/// change nothing themselves.
pub fn restore_after_crash(
    files: &impl CpufreqFiles,
    directory: &RuntimeDirectory,
) -> RecoveryReport {
    let mut recovered = RecoveryReport::default();
    let _alone = match lock_frequency_control(directory.path()) {
        Ok(locked) => locked,
        Err(found) => {
            let (path, found) = (directory.path().to_owned(), found.to_string());
            recovered.errors.push(FrequencyError::Journal { path, found });
            return recovered;
        }
    };
    let mut cores = Vec::new();
    for found in journal_entries(directory).into_iter().filter(|found| found.stale_lock.is_some()) {
        let mut refused = false;
        for line in found.text.lines() {
            let Some((core, state)) = parse_journal_line(line) else {
                let (path, found) = (found.path.clone(), format!("line is '{line}'"));
                recovered.errors.push(FrequencyError::Journal { path, found });
                continue;
            };
            match state.write_state(files, core) {
                // Taken offline since; it is initialized when it comes back online.
                None if CpufreqState::read_state(files, core).is_none() => {}
                None => cores.push(core),
                Some(error) => {
                    recovered.errors.push(error);
                    refused = true;
                }
            }
        }
        // Kept if a value was refused, for a later attempt.
        if !refused {
            let _ = std::fs::remove_file(&found.path);
        }
    }
    recovered.cores = cores.into_iter().collect();
    recovered
}

/// Waits for exclusive access to frequency control, which lasts while the returned file is open.
pub(super) fn lock_frequency_control(directory: &Path) -> Result<File, Errno> {
    let locked =
        File::open(directory).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    while let Err(errno) = flock(&locked, FlockOperation::LockExclusive) {
        if errno != Errno::INTR {
            return Err(errno);
        }
    }
    Ok(locked)
}

/// CPUs controlled by running processes, and their journals.
pub(super) fn controlled_cpus(directory: &RuntimeDirectory) -> Vec<(PathBuf, CpuList)> {
    let living = journal_entries(directory).into_iter().filter(|found| found.stale_lock.is_none());
    let cores =
        |text: &str| text.lines().filter_map(parse_journal_line).map(|(core, _)| core).collect();
    living.map(|found| (found.path, cores(&found.text))).collect()
}

fn journal_entries(directory: &RuntimeDirectory) -> Vec<JournalEntry> {
    let entries = std::fs::read_dir(directory.path()).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let ours = |path: &PathBuf| path.extension().is_some_and(|extension| extension == SUFFIX);
    let mut found: Vec<JournalEntry> = paths.filter(ours).filter_map(read_entry).collect();
    found.sort_unstable_by(|one, other| one.path.cmp(&other.path));
    found
}

fn read_entry(path: PathBuf) -> Option<JournalEntry> {
    let mut file = File::open(&path).ok()?;
    let abandoned = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
    // Another process may have restored and deleted it between our open and lock.
    if file.metadata().ok()?.nlink() == 0 {
        return None;
    }
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    Some(JournalEntry { path, text, stale_lock: abandoned.then_some(file) })
}

fn write_locked(path: &Path, text: &str) -> std::io::Result<File> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    file.write_all(text.as_bytes())?;
    Ok(file)
}

fn journal_lines(domains: &[CpufreqPolicy]) -> String {
    let line = |domain: &CpufreqPolicy| {
        let CpufreqState { min_khz, max_khz, preference } = domain.found_state();
        let hint = preference.as_deref().unwrap_or(NO_HINT);
        format!("{} {min_khz} {max_khz} {hint}\n", domain.first_own_cpu())
    };
    domains.iter().map(line).collect()
}

/// Parses a line strictly, since its values are written to kernel files.
fn parse_journal_line(line: &str) -> Option<(u32, CpufreqState)> {
    let mut fields = line.split(' ');
    let core =
        CpuList::parse(fields.next()?).ok().filter(|cores| cores.len() == 1)?.iter().next()?;
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
        .then_some((core, CpufreqState { min_khz, max_khz, preference }))
}
