//! Errors of frequency control.

use std::fmt;
use std::path::PathBuf;

use rustix::io::Errno;
use tenmil_base::ErrorCategory;

use crate::CpuList;

/// Frequency control is not available. Nothing else depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CpufreqUnavailable {
    /// The kernel has no cpufreq files for any of the CPUs.
    NoCpufreq {
        /// Requested CPUs.
        cores: CpuList,
    },
    /// The journal could not be written, so nothing may be changed.
    NoJournal {
        /// Path of the journal.
        path: PathBuf,
        /// Error of the system call.
        found: Errno,
    },
}

/// One failed operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FrequencyError {
    /// A write was refused.
    Write {
        /// Kernel file.
        file: String,
        /// Value written.
        value: String,
        /// Error of the system call.
        errno: Errno,
    },
    /// Another tenmil process controls this CPU.
    ControlledElsewhere {
        /// The CPU.
        core: u32,
        /// Journal of that process.
        by: PathBuf,
    },
    /// The journal of an exited process is malformed.
    Journal {
        /// Path of the journal.
        path: PathBuf,
        /// The unparsable line, or the kernel's error.
        found: String,
    },
}

impl CpufreqUnavailable {
    /// Error category: always environment.
    pub const fn category(&self) -> ErrorCategory {
        ErrorCategory::Environment
    }
}

impl FrequencyError {
    /// Error category: always environment.
    pub const fn category(&self) -> ErrorCategory {
        ErrorCategory::Environment
    }

    /// Hint for the user, if any.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Write { file, errno: Errno::ACCESS | Errno::PERM, .. } => {
                Some(format!("let this user choose with `sudo chown $USER {file}`, for each core"))
            }
            _ => None,
        }
    }
}

impl fmt::Display for CpufreqUnavailable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "frequency scaling is unchanged: ")?;
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
            Self::ControlledElsewhere { core, by } => {
                write!(out, "set frequency of core {core}: held by {}", by.display())
            }
            Self::Journal { path, found } => {
                write!(out, "restore frequencies from {}: {found}", path.display())
            }
        }
    }
}

impl std::error::Error for CpufreqUnavailable {}
impl std::error::Error for FrequencyError {}
