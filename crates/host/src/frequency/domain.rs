//! Processors that change their frequency together.

use super::{Absent, Files, FrequencyError, Speed};
use crate::Cores;

/// Processors that change their frequency together, and what they may choose from.
#[derive(Clone, Debug)]
pub struct Domain {
    /// The first of ours; its files stand for the domain.
    core: u32,
    cores: Cores,
    /// Whether it has processors that are not ours.
    shared: bool,
    driver: Option<String>,
    governor: Option<String>,
    /// What may be chosen, in kHz, ascending; two or more, or there is nothing to choose.
    steps: Vec<u64>,
    /// What was there before us.
    found: State,
    /// What the kernel was last told.
    now: State,
    /// What was last refused.
    refused: Option<FrequencyError>,
}

/// What the files of a domain say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub(super) min_khz: u64,
    pub(super) max_khz: u64,
    pub(super) preference: Option<String>,
}

/// Into how many steps a range is cut if the driver does not name its frequencies.
const STEPS: u64 = 10;

const MIN: &str = "scaling_min_freq";
const MAX: &str = "scaling_max_freq";
const PREFERENCE: &str = "energy_performance_preference";

impl Domain {
    /// The domains of these processors.
    pub(super) fn all(files: &impl Files, cores: &Cores) -> Result<Vec<Self>, Absent> {
        let mut domains: Vec<Self> = Vec::new();
        for core in cores.iter() {
            if !domains.iter().any(|domain| domain.cores.contains(core)) {
                domains.extend(Self::of(files, core, cores));
            }
        }
        if domains.is_empty() {
            return Err(Absent::NoCpufreq { cores: cores.clone() });
        }
        Ok(domains)
    }

    fn of(files: &impl Files, core: u32, ours: &Cores) -> Option<Self> {
        let text = |name: &str| files.text(&path(core, name)).filter(|text| !text.is_empty());
        let found = State::read(files, core)?;
        let listed = text("affected_cpus").map(|list| list.replace(' ', ","));
        let mut cores = listed.and_then(|list| Cores::parse(&list).ok()).unwrap_or_default();
        if !cores.contains(core) {
            cores = cores.iter().chain([core]).collect();
        }
        Some(Self {
            core,
            shared: cores.and(ours) != cores,
            cores,
            driver: text("scaling_driver"),
            governor: text("scaling_governor"),
            steps: steps(text("scaling_available_frequencies").as_deref(), &found),
            now: found.clone(),
            found,
            refused: None,
        })
    }

    /// The first of its processors that is ours.
    pub fn core(&self) -> u32 {
        self.core
    }

    /// All of its processors.
    pub fn cores(&self) -> &Cores {
        &self.cores
    }

    /// Whether some of its processors are not ours, so that it is never made slower.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// The kernel's driver.
    pub fn driver(&self) -> Option<&str> {
        self.driver.as_deref()
    }

    /// The kernel's governor.
    pub fn governor(&self) -> Option<&str> {
        self.governor.as_deref()
    }

    /// What may be chosen, in kHz, ascending. Empty if the range that was found is a point.
    pub fn steps_khz(&self) -> &[u64] {
        &self.steps
    }

    /// The range that the kernel was last told, in kHz.
    pub fn range_khz(&self) -> (u64, u64) {
        (self.now.min_khz, self.now.max_khz)
    }

    pub(super) fn found(&self) -> &State {
        &self.found
    }

    /// Tells the kernel what is wished; gives the error unless it was the same the last time.
    pub(super) fn set(&mut self, files: &impl Files, wish: Speed) -> Option<FrequencyError> {
        let target = self.target(wish)?;
        let refused = self.go_to(files, &target);
        let news = refused.clone().filter(|_| refused != self.refused);
        self.refused = refused;
        news
    }

    /// Puts back what was found.
    pub(super) fn restore(&mut self, files: &impl Files) -> Option<FrequencyError> {
        let found = self.found.clone();
        self.go_to(files, &found)
    }

    /// What the files are to say; `None` if they may stay as they are.
    fn target(&self, wish: Speed) -> Option<State> {
        let (lowest, highest) = (*self.steps.first()?, *self.steps.last()?);
        if wish == Speed::Found || self.shared && wish < Speed::Keep {
            return Some(self.found.clone());
        }
        let khz = match wish {
            Speed::Keep | Speed::Found => return None,
            Speed::Lowest => lowest,
            Speed::Highest => highest,
            Speed::Up => self.steps.iter().find(|step| **step > self.level()).copied()?,
            Speed::Down => self.steps.iter().rfind(|step| **step < self.level()).copied()?,
        };
        let hint = match wish {
            Speed::Lowest => Some("power"),
            Speed::Highest => Some("performance"),
            _ => None,
        };
        let found = self.found.preference.as_ref();
        let preference = found.map(|found| hint.unwrap_or(found).to_owned());
        Some(State { min_khz: khz, max_khz: khz, preference })
    }

    /// The frequency to step from: the top of the range.
    fn level(&self) -> u64 {
        self.now.max_khz
    }

    /// Writes what differs. The range is opened before it is closed, so that its lower end is never
    /// above its upper one, which the kernel would refuse.
    fn go_to(&mut self, files: &impl Files, target: &State) -> Option<FrequencyError> {
        let grows = target.max_khz >= self.now.max_khz;
        let order = if grows { [MAX, MIN] } else { [MIN, MAX] };
        let mut refused = None;
        for name in order {
            let (new, now) = match name {
                MAX => (target.max_khz, &mut self.now.max_khz),
                _ => (target.min_khz, &mut self.now.min_khz),
            };
            if new != *now && refused.is_none() {
                match write(files, self.core, name, &new.to_string()) {
                    Ok(()) => *now = new,
                    Err(error) => refused = Some(error),
                }
            }
        }
        if let Some(preference) = &target.preference
            && self.now.preference.as_ref() != Some(preference)
        {
            match write(files, self.core, PREFERENCE, preference) {
                Ok(()) => self.now.preference = Some(preference.clone()),
                // A hint: the range is what counts, so its error is told first.
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        refused
    }
}

impl State {
    /// What the files of a processor say; `None` if it has none.
    pub(super) fn read(files: &impl Files, core: u32) -> Option<Self> {
        let number = |name| files.text(&path(core, name))?.parse().ok();
        let preference = files.text(&path(core, PREFERENCE)).filter(|text| !text.is_empty());
        Some(Self { min_khz: number(MIN)?, max_khz: number(MAX)?, preference })
    }

    /// Puts a processor into this state, from whatever state it is in.
    pub(super) fn put_back(&self, files: &impl Files, core: u32) -> Option<FrequencyError> {
        let now = Self::read(files, core)?;
        let mut domain = Domain {
            core,
            cores: [core].into_iter().collect(),
            shared: false,
            driver: None,
            governor: None,
            steps: Vec::new(),
            found: self.clone(),
            now,
            refused: None,
        };
        domain.restore(files)
    }
}

/// The frequencies of a range: those the driver names, or equal parts.
fn steps(named: Option<&str>, found: &State) -> Vec<u64> {
    let State { min_khz, max_khz, .. } = *found;
    if min_khz >= max_khz {
        return Vec::new();
    }
    let named = named.unwrap_or_default().split_whitespace().filter_map(|khz| khz.parse().ok());
    let mut steps: Vec<u64> =
        named.filter(|khz| (min_khz..=max_khz).contains(khz)).chain([min_khz, max_khz]).collect();
    if steps.len() == 2 {
        let part = |step| min_khz + (max_khz - min_khz) / STEPS * step;
        steps.extend((1..STEPS).map(part));
    }
    steps.sort_unstable();
    steps.dedup();
    steps
}

fn write(files: &impl Files, core: u32, name: &str, value: &str) -> Result<(), FrequencyError> {
    let path = path(core, name);
    files.write(&path, value).map_err(|errno| FrequencyError::Write {
        file: format!("/{path}"),
        value: value.into(),
        errno,
    })
}

fn path(core: u32, name: &str) -> String {
    format!("sys/devices/system/cpu/cpu{core}/cpufreq/{name}")
}
