//! CPU placement of the threads of a run.

use tenmil_linux::CpuList;

use crate::perf::perf_options::PerfOptions;
use crate::perf::perf_result::ThreadPlacement;

/// Cores of the host and device threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreAssignment {
    /// One entry per submitting thread.
    pub submit: Vec<Option<u32>>,
    /// One entry per device thread.
    pub device: Vec<Option<u32>>,
    /// Host and device share a CPU, so an idle thread must yield.
    pub yields: bool,
}

impl CoreAssignment {
    /// Uses the cores that `options` name. By default submitting uses the first allowed core, and
    /// emulated SSDs, if there are any, use the last of the others.
    pub fn from_options(options: &PerfOptions, allowed: &CpuList) -> Self {
        let given = |cores: &CpuList| cores.iter().map(Some).collect::<Vec<_>>();
        let mut submit = given(&options.cores);
        if submit.is_empty() {
            let first = allowed.iter().find(|core| !options.device_cores.contains(*core));
            submit.push(first.or_else(|| allowed.iter().next()));
        }
        let mut device = given(&options.device_cores);
        if device.is_empty() {
            let other = allowed.iter().filter(|core| !submit.contains(&Some(*core))).last();
            device.push(other.or(submit[0]));
        }
        if options.emulated_ssds().next().is_none() {
            // No device thread needs a CPU of its own, but the threads of the kernel or of a
            // library need this one if it is the only one.
            let yields = allowed.len() < 2;
            return Self { submit, device: Vec::new(), yields };
        }
        let yields = device.iter().any(|core| submit.contains(core));
        Self { submit, device, yields }
    }

    /// Cores of the submitting threads, one reactor each.
    pub fn submit_cores(&self) -> CpuList {
        self.submit.iter().flatten().copied().collect()
    }

    /// Placement of all threads, for the report.
    pub fn thread_placements(&self) -> Vec<ThreadPlacement> {
        let of = |role, cores: &[Option<u32>]| {
            cores.iter().map(|core| ThreadPlacement { role, core: *core }).collect::<Vec<_>>()
        };
        [of("submit", &self.submit), of("device", &self.device)].concat()
    }
}

#[cfg(test)]
mod tests {
    use tenmil_linux::CpuList;

    use super::CoreAssignment;
    use crate::perf::perf_options::PerfOptions;

    fn assigned_cores(cores: &[u32], device_cores: &[u32], allowed: &[u32]) -> CoreAssignment {
        let set = |cores: &[u32]| cores.iter().copied().collect::<CpuList>();
        let (cores, device_cores) = (set(cores), set(device_cores));
        let options = PerfOptions { cores, device_cores, ..PerfOptions::default() };
        CoreAssignment::from_options(&options, &set(allowed))
    }

    #[test]
    fn host_and_device_threads_get_separate_cores_if_possible() {
        let both = assigned_cores(&[], &[], &[2, 5, 7]);
        assert_eq!((both.submit, both.device), (vec![Some(2)], vec![Some(7)]));
        assert!(!both.yields);
        let fixed = assigned_cores(&[5], &[], &[2, 5, 7]);
        assert_eq!((fixed.submit, fixed.device), (vec![Some(5)], vec![Some(7)]));
        let fixed = assigned_cores(&[], &[2], &[2, 5]);
        assert_eq!((fixed.submit, fixed.device), (vec![Some(5)], vec![Some(2)]));
    }

    #[test]
    fn without_emulated_ssds_no_device_threads_are_placed() {
        let places = |allowed: &[u32]| {
            let uris = vec!["ram:1m".parse().unwrap()];
            let options = PerfOptions { uris, ..PerfOptions::default() };
            CoreAssignment::from_options(&options, &allowed.iter().copied().collect())
        };
        assert_eq!((places(&[2, 5]).submit, places(&[2, 5]).device), (vec![Some(2)], vec![]));
        assert!(!places(&[2, 5]).yields && places(&[2]).yields);
    }

    #[test]
    fn on_a_single_core_both_sides_yield() {
        let one = assigned_cores(&[], &[], &[3]);
        assert_eq!((one.submit, one.device), (vec![Some(3)], vec![Some(3)]));
        assert!(one.yields);
        assert!(assigned_cores(&[0, 1], &[1], &[0, 1]).yields);
    }
}
