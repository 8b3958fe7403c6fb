//! How fast processors run: the kernel's cpufreq files, set and put back.
//!
//! Every driver (acpi-cpufreq, intel_pstate and amd-pstate in all of their modes, cppc_cpufreq) and
//! every governor honours the same two files, so a frequency is chosen by setting both to it:
//!
//! ```text
//!   /sys/devices/system/cpu/cpuN/cpufreq/
//!     scaling_min_freq  ─┐ the range, as we found it, is what the machine's owner allows;
//!     scaling_max_freq  ─┘ we choose within it and never leave it
//!     energy_performance_preference      a hint beside it, where the driver has one
//!     affected_cpus                      who else is changed with this processor
//! ```
//!
//! Processors that are changed together are a [`Domain`]. One that is not ours alone is never made
//! slower.
//!
//! What was found is written to a file in the runtime directory before anything is changed. It is
//! put back when a [`Frequency`] is dropped, and after a crash by whoever calls [`recover`] next.
//! Taking charge and putting back wait for each other, from process to process.

mod domain;
mod journal;
mod refused;

use crate::Cores;
use crate::machine::Machine;
use crate::runtime_directory::RuntimeDirectory;
pub use domain::Domain;
use journal::Journal;
pub use journal::{Recovered, recover};
pub use refused::{Absent, FrequencyError};
use rustix::io::Errno;

/// The frequency of some processors, while this lives.
#[derive(Debug)]
pub struct Frequency<F: Files = Machine> {
    files: F,
    domains: Vec<Domain>,
    held: Vec<FrequencyError>,
    journal: Journal,
}

/// How fast a processor is to run. Of several wishes for one domain the greatest counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Speed {
    /// As slow as it may.
    Lowest,
    /// A step slower.
    Down,
    /// As it is.
    #[default]
    Keep,
    /// As it was found.
    Found,
    /// A step faster.
    Up,
    /// As fast as it may.
    Highest,
}

impl Speed {
    /// The wish in one word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lowest => "lowest",
            Self::Down => "down",
            Self::Keep => "keep",
            Self::Found => "found",
            Self::Up => "up",
            Self::Highest => "highest",
        }
    }
}

/// Files of the kernel: a [`Machine`], or what a test has in its place.
pub trait Files {
    /// The contents without the white space around them, if the file is there and can be read.
    fn text(&self, path: &str) -> Option<String>;
    /// Writes a value into a file that is there.
    fn write(&self, path: &str, value: &str) -> Result<(), Errno>;
}

impl Files for Machine {
    fn text(&self, path: &str) -> Option<String> {
        Machine::text(self, path)
    }

    fn write(&self, path: &str, value: &str) -> Result<(), Errno> {
        Machine::write(self, path, value)
    }
}

impl<F: Files> Frequency<F> {
    /// Takes charge of the frequency of these processors. Nothing is changed yet.
    pub fn open(files: F, cores: &Cores, directory: &RuntimeDirectory) -> Result<Self, Absent> {
        // Whoever gives a processor back meanwhile must not be taken for its owner's wish.
        let _alone = journal::alone(directory.path())
            .map_err(|found| Absent::NoJournal { path: directory.path().to_owned(), found })?;
        let held = journal::held(directory);
        let mut domains = Domain::all(&files, cores)?;
        let taken = |domain: &Domain| {
            let holder = held.iter().find(|(_, cores)| !cores.and(domain.cores()).is_empty())?;
            Some(FrequencyError::Held { core: domain.core(), by: holder.0.clone() })
        };
        let refused = domains.iter().filter_map(taken).collect();
        domains.retain(|domain| taken(domain).is_none());
        let journal = Journal::write(directory, &domains)
            .map_err(|(path, found)| Absent::NoJournal { path, found })?;
        Ok(Self { files, domains, held: refused, journal })
    }

    /// What there is to choose, by domain.
    pub fn domains(&self) -> &[Domain] {
        &self.domains
    }

    /// Domains that another process of ours has in charge; they are left to it.
    pub fn held(&self) -> &[FrequencyError] {
        &self.held
    }

    /// Sets the speed of processors. A value that the kernel refuses is tried again at the next
    /// call; the error is given once, until it changes. Processors without a domain are ignored.
    pub fn apply(&mut self, wishes: &[(u32, Speed)]) -> Vec<FrequencyError> {
        let mut errors = Vec::new();
        for domain in &mut self.domains {
            let of_domain = wishes.iter().filter(|wish| domain.cores().contains(wish.0));
            let wish = of_domain.map(|wish| wish.1).max().unwrap_or_default();
            errors.extend(domain.set(&self.files, wish));
        }
        errors
    }

    /// Puts back what was found. What cannot be put back stays in the file of the runtime
    /// directory, for [`recover`] by somebody who may.
    pub fn restore(&mut self) -> Vec<FrequencyError> {
        // Without it too: what was found is better than what was made of it.
        let _alone = self.journal.alone();
        let mut errors = Vec::new();
        for domain in &mut self.domains {
            errors.extend(domain.restore(&self.files));
        }
        if errors.is_empty() {
            self.journal.done();
        }
        errors
    }
}

impl<F: Files> Drop for Frequency<F> {
    fn drop(&mut self) {
        // Whoever wants to know what went wrong calls `restore` first.
        self.restore();
    }
}

#[cfg(test)]
mod tests;
