//! CPU topology, and the CPUs currently available.
//!
//! The cpuset and quota of a container may change at any time without notification: a thread pinned
//! to a CPU that is taken away runs elsewhere from then on. Therefore a scheduler reads them
//! periodically.

use crate::CpuList;
use crate::cgroup::CgroupLimits;
use crate::kernel_files::KernelFiles;

/// Location of a CPU. Constant while the machine runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuLocation {
    /// CPU number.
    pub core: u32,
    /// CPUs that share its physical core, itself included. Empty if unknown.
    pub siblings: CpuList,
    /// NUMA node.
    pub node: Option<u32>,
}

/// CPUs and quota available now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AvailableCpus {
    /// CPUs that are online and in the cpuset of the control group.
    pub cores: CpuList,
    /// CPU quota of the control group, in CPUs. `None` is unlimited.
    pub quota: Option<f64>,
}

impl CpuLocation {
    /// Reads the location of each of `cores`.
    pub fn read_all(machine: &KernelFiles, cores: &CpuList) -> Vec<Self> {
        let place = |core| Self {
            core,
            siblings: machine.hyperthread_siblings(core).unwrap_or_default(),
            node: machine.numa_node(core),
        };
        cores.iter().map(place).collect()
    }
}

impl AvailableCpus {
    /// Reads what is available of `cores` now. An unreadable value restricts nothing. Reads a few
    /// kernel files, in about 100 µs.
    pub fn read_available(machine: &KernelFiles, cores: &CpuList) -> Self {
        let limits = CgroupLimits::read(machine);
        let left = [machine.online_cpus(), limits.cpus].into_iter().flatten();
        let cores = left.fold(cores.clone(), |cores, there| cores.intersection(&there));
        Self { cores, quota: limits.quota }
    }
}

#[cfg(test)]
mod tests {
    use super::{AvailableCpus, CpuLocation};
    use crate::CpuList;
    use crate::kernel_files::{KernelFiles, tests::fake_kernel_files};

    fn core_list(text: &str) -> CpuList {
        CpuList::parse(text).unwrap()
    }

    #[test]
    fn cpus_taken_offline_at_run_time_are_noticed() {
        let (root, machine) = fake_kernel_files(&[
            ("proc/self/cgroup", "0::/pod\n"),
            ("sys/devices/system/cpu/online", "0-7\n"),
            ("sys/fs/cgroup/pod/cpuset.cpus.effective", "0-7\n"),
            ("sys/fs/cgroup/pod/cpu.max", "max 100000\n"),
        ]);
        assert_eq!(
            AvailableCpus::read_available(&machine, &core_list("2-4")),
            AvailableCpus { cores: core_list("2-4"), quota: None }
        );
        let write = |path: &str, text| std::fs::write(root.path().join(path), text).unwrap();
        write("sys/fs/cgroup/pod/cpuset.cpus.effective", "3-7\n");
        write("sys/fs/cgroup/pod/cpu.max", "150000 100000\n");
        write("sys/devices/system/cpu/online", "0-3,5-7\n");
        let left = AvailableCpus { cores: core_list("3"), quota: Some(1.5) };
        assert_eq!(AvailableCpus::read_available(&machine, &core_list("2-4")), left);
    }

    #[test]
    fn unreadable_values_restrict_nothing() {
        let (_root, machine) = fake_kernel_files(&[]);
        assert_eq!(
            AvailableCpus::read_available(&machine, &core_list("0,9")).cores,
            core_list("0,9")
        );
        let place = CpuLocation { core: 9, ..CpuLocation::default() };
        assert_eq!(CpuLocation::read_all(&machine, &core_list("9")), [place]);
    }

    #[test]
    fn cpu_locations_are_read_from_sysfs() {
        let (_root, machine) = fake_kernel_files(&[
            ("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "1,5\n"),
            ("sys/devices/system/node/online", "0-1\n"),
            ("sys/devices/system/node/node1/cpulist", "1,5\n"),
        ]);
        let place = CpuLocation { core: 1, siblings: core_list("1,5"), node: Some(1) };
        assert_eq!(CpuLocation::read_all(&machine, &core_list("1")), [place]);
    }

    #[test]
    fn allowed_cpus_of_this_process_are_available() {
        let allowed = CpuList::allowed_cpus();
        assert_eq!(
            AvailableCpus::read_available(&KernelFiles::live_system(), &allowed).cores,
            allowed
        );
    }
}
