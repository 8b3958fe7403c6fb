//! CPU lists and thread pinning.

use std::fmt;

use rustix::io::Errno;
use rustix::thread::CpuSet;
use tenmil_base::ErrorCategory;

/// Set of CPU numbers, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuList(Vec<u32>);

/// The text is not a CPU list or mask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuListParseError {
    /// The rejected text.
    pub text: String,
}

/// A thread could not be pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinError {
    /// CPU to which it was to be pinned.
    pub core: u32,
    /// Error of the system call.
    pub errno: Errno,
    /// CPUs that this thread may use.
    pub allowed: CpuList,
}

/// Number of CPUs that the set of the C library supports: 1024, and 128 with musl. The kernel's largest
/// configuration has 8192.
#[expect(clippy::cast_possible_truncation, reason = "it is at most 1024")]
const CPUS_MAX: u32 = CpuSet::MAX_CPU as u32;

impl CpuList {
    /// Parses a list, `0,2-3`, or a mask, `0xd`.
    pub fn parse(text: &str) -> Result<Self, CpuListParseError> {
        let cores = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
            Some(digits) => parse_mask(digits),
            None => parse_list(text),
        };
        cores
            .filter(|cores| !cores.is_empty())
            .map(Self::from_iter)
            .ok_or_else(|| CpuListParseError { text: text.into() })
    }

    /// CPUs on which the current thread may run.
    pub fn allowed_cpus() -> Self {
        // Fails only on kernels with more than 1024 CPUs; then every number is tried.
        rustix::thread::sched_getaffinity(None)
            .map(|set| (0..CPUS_MAX).filter(|core| set.is_set(*core as usize)).collect())
            .unwrap_or_else(|_| (0..CPUS_MAX).collect())
    }

    /// Number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `core` is in the set.
    pub fn contains(&self, core: u32) -> bool {
        self.0.binary_search(&core).is_ok()
    }

    /// The CPUs, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Intersection of the two sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        self.iter().filter(|core| other.contains(*core)).collect()
    }
}

impl FromIterator<u32> for CpuList {
    fn from_iter<I: IntoIterator<Item = u32>>(cores: I) -> Self {
        let mut cores: Vec<u32> = cores.into_iter().collect();
        cores.sort_unstable();
        cores.dedup();
        Self(cores)
    }
}

/// Pins the current thread to one CPU.
pub fn pin_current_thread(core: u32) -> Result<(), PinError> {
    let refuse = |errno| PinError { core, errno, allowed: CpuList::allowed_cpus() };
    if core >= CPUS_MAX {
        return Err(refuse(Errno::INVAL));
    }
    let mut set = CpuSet::new();
    set.set(core as usize);
    rustix::thread::sched_setaffinity(None, &set).map_err(refuse)
}

/// Parses `0,2-3`, with an optional trailing newline as in kernel files.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    let mut cores = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (parse_core(first)?, parse_core(last)?);
        if first > last {
            return None;
        }
        cores.extend(first..=last);
    }
    Some(cores)
}

fn parse_core(text: &str) -> Option<u32> {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|core| plain && *core < CPUS_MAX)
}

/// Parses a mask of any length, with optional commas between words as in kernel files.
fn parse_mask(digits: &str) -> Option<Vec<u32>> {
    let mut cores = Vec::new();
    let digits = digits.bytes().rev().filter(|byte| *byte != b',');
    for (first, digit) in (0..).step_by(4).zip(digits) {
        let bits = char::from(digit).to_digit(16)?;
        cores.extend((0..4).filter(|bit| bits & (1 << bit) != 0).map(|bit| first + bit));
    }
    cores.iter().all(|core| *core < CPUS_MAX).then_some(cores)
}

impl CpuListParseError {
    /// Error category: always usage.
    pub const fn category(&self) -> ErrorCategory {
        ErrorCategory::Usage
    }
}

impl PinError {
    /// Error category: usage if the CPU is not available to this process, else environment.
    pub fn category(&self) -> ErrorCategory {
        if self.allowed.contains(self.core) {
            ErrorCategory::Environment
        } else {
            ErrorCategory::Usage
        }
    }
}

impl fmt::Display for CpuList {
    /// Formats the shortest list: `0,2-3`.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_slice();
        while let Some(&first) = rest.first() {
            let run = (first..).zip(rest).take_while(|(number, core)| number == *core).count();
            let last = rest[run - 1];
            let comma = if run < rest.len() { "," } else { "" };
            if first == last {
                write!(out, "{first}{comma}")?;
            } else {
                write!(out, "{first}-{last}{comma}")?;
            }
            rest = &rest[run..];
        }
        Ok(())
    }
}

impl fmt::Display for CpuListParseError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { text } = self;
        write!(out, "cores '{text}': expected a list such as 0,2-3 or a mask such as 0xd, ")?;
        write!(out, "with numbers below {CPUS_MAX}")
    }
}

impl fmt::Display for PinError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { core, errno, allowed } = self;
        write!(out, "pin thread to core {core}: {errno}, expected one of {allowed}")
    }
}

impl std::error::Error for CpuListParseError {}
impl std::error::Error for PinError {}

#[cfg(test)]
mod tests {
    use tenmil_base::ErrorCategory;

    use super::{CpuList, pin_current_thread};

    #[test]
    fn lists_and_masks_parse_to_the_same_cpus() {
        for (text, shown) in [
            ("0", "0"),
            ("0,2-3", "0,2-3"),
            ("3,2,0,2", "0,2-3"),
            ("0xd", "0,2-3"),
            ("0XD", "0,2-3"),
            ("0x3", "0-1"),
            ("0x1,00000001", "0,32"),
            ("0-1\n", "0-1"),
            ("1023", "1023"),
        ] {
            assert_eq!(CpuList::parse(text).unwrap().to_string(), shown, "{text}");
        }
    }

    #[test]
    fn text_that_is_no_cpu_list_is_rejected_by_name() {
        for text in ["", "0x", "0x0", "-", "1-", "3-2", "a", "0,,1", "+1", "1024", "0-99999", "0xg"]
        {
            let error = CpuList::parse(text).unwrap_err();
            assert!(error.to_string().starts_with(&format!("cores '{text}'")), "{error}");
            assert_eq!(error.category(), ErrorCategory::Usage);
        }
    }

    #[test]
    fn pinned_thread_runs_only_on_its_cpu() {
        let core = CpuList::allowed_cpus().iter().next().unwrap();
        let shown =
            std::thread::spawn(move || pin_current_thread(core).map(|()| CpuList::allowed_cpus()));
        assert_eq!(shown.join().unwrap().unwrap().iter().collect::<Vec<_>>(), [core]);
    }

    #[test]
    fn pinning_to_a_nonexistent_cpu_lists_the_existing_ones() {
        for core in [1023, 5_000] {
            let error = pin_current_thread(core).unwrap_err();
            assert_eq!(error.category(), ErrorCategory::Usage);
            assert!(error.to_string().contains(&CpuList::allowed_cpus().to_string()), "{error}");
        }
    }

    #[test]
    fn intersection_contains_the_common_cpus() {
        let set = |text| CpuList::parse(text).unwrap();
        assert_eq!(set("0-3").intersection(&set("2-9")), set("2,3"));
        assert!(set("0").intersection(&set("1")).is_empty());
    }
}
