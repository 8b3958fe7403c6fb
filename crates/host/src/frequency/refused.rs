//! What can be in the way of choosing a frequency.

use std::fmt;
use std::path::PathBuf;

use base::Blame;
use rustix::io::Errno;

use crate::Cores;

/// Why there is nothing to choose here. Everything else works without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Absent {
    /// The kernel has no cpufreq files for any of the processors.
    NoCpufreq {
        /// Which were asked for.
        cores: Cores,
    },
    /// What was found could not be written down, so nothing may be changed.
    NoJournal {
        /// Where.
        path: PathBuf,
        /// What the kernel answered.
        found: Errno,
    },
}

/// Something that was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FrequencyError {
    /// A value was not taken.
    Write {
        /// The kernel's file.
        file: String,
        /// What was written into it.
        value: String,
        /// What the kernel answered.
        errno: Errno,
    },
    /// Another process of ours has this processor in charge.
    Held {
        /// Which processor.
        core: u32,
        /// The file in which that process keeps what it found.
        by: PathBuf,
    },
    /// The file of a process that is gone is not as one of ours would have written it.
    Journal {
        /// Which file.
        path: PathBuf,
        /// The line that cannot be read, or the kernel's answer.
        found: String,
    },
}

impl Absent {
    /// Always the machine's move.
    pub const fn blame(&self) -> Blame {
        Blame::Machine
    }
}

impl FrequencyError {
    /// Always the machine's move.
    pub const fn blame(&self) -> Blame {
        Blame::Machine
    }

    /// What to do about it, if there is something.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Write { file, errno: Errno::ACCESS | Errno::PERM, .. } => {
                Some(format!("let this user choose with `sudo chown $USER {file}`, for each core"))
            }
            _ => None,
        }
    }
}

impl fmt::Display for Absent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "frequency scaling is left alone: ")?;
        match self {
            Self::NoCpufreq { cores } => {
                write!(out, "the kernel has no cpufreq for cores {cores}")
            }
            Self::NoJournal { path, found } => {
                write!(
                    out,
                    "write {}: {found}, expected to keep there what is to be restored",
                    path.display()
                )
            }
        }
    }
}

impl fmt::Display for FrequencyError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write { file, value, errno } => write!(out, "write {value} to {file}: {errno}"),
            Self::Held { core, by } => {
                write!(out, "set frequency of core {core}: held by {}", by.display())
            }
            Self::Journal { path, found } => {
                write!(out, "restore frequencies from {}: {found}", path.display())
            }
        }
    }
}

impl std::error::Error for Absent {}
impl std::error::Error for FrequencyError {}
