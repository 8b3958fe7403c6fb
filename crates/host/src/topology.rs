//! Where processors lie, and which of them are still ours.
//!
//! A container's cpuset and quota may change at any time, and the kernel tells nobody: a thread that
//! was bound to a processor that is taken away runs somewhere else from then on. So whoever spreads
//! work looks again now and then.

use crate::Cores;
use crate::cgroup::Limits;
use crate::machine::Machine;

/// Where a processor lies. Does not change while the machine runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Its number.
    pub core: u32,
    /// The processors that share its physical core, itself included. Empty if that is not known.
    pub siblings: Cores,
    /// The memory node that it is near to.
    pub node: Option<u32>,
}

/// What there is of some processors at the moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ours {
    /// Those that are switched on and in the cpuset of our control group.
    pub cores: Cores,
    /// Processors' worth of time that our control group has. `None` is no limit.
    pub quota: Option<f64>,
}

impl Place {
    /// Where processors lie on a machine, one for each.
    pub fn of(machine: &Machine, cores: &Cores) -> Vec<Self> {
        let place = |core| Self {
            core,
            siblings: machine.siblings(core).unwrap_or_default(),
            node: machine.node(core),
        };
        cores.iter().map(place).collect()
    }
}

impl Ours {
    /// What there is of these processors now. What cannot be found out takes nothing away. Reads
    /// a few files of the kernel, in about 100 µs.
    pub fn of(machine: &Machine, cores: &Cores) -> Self {
        let limits = Limits::read(machine);
        let left = [machine.online(), limits.cores].into_iter().flatten();
        let cores = left.fold(cores.clone(), |cores, there| cores.and(&there));
        Self { cores, quota: limits.quota }
    }
}

#[cfg(test)]
mod tests {
    use super::{Ours, Place};
    use crate::Cores;
    use crate::machine::{Machine, tests::made_of};

    fn cores(text: &str) -> Cores {
        Cores::parse(text).unwrap()
    }

    #[test]
    fn what_is_taken_away_while_running_is_seen() {
        let (root, machine) = made_of(&[
            ("proc/self/cgroup", "0::/pod\n"),
            ("sys/devices/system/cpu/online", "0-7\n"),
            ("sys/fs/cgroup/pod/cpuset.cpus.effective", "0-7\n"),
            ("sys/fs/cgroup/pod/cpu.max", "max 100000\n"),
        ]);
        assert_eq!(Ours::of(&machine, &cores("2-4")), Ours { cores: cores("2-4"), quota: None });
        let write = |path: &str, text| std::fs::write(root.path().join(path), text).unwrap();
        write("sys/fs/cgroup/pod/cpuset.cpus.effective", "3-7\n");
        write("sys/fs/cgroup/pod/cpu.max", "150000 100000\n");
        write("sys/devices/system/cpu/online", "0-3,5-7\n");
        let left = Ours { cores: cores("3"), quota: Some(1.5) };
        assert_eq!(Ours::of(&machine, &cores("2-4")), left);
    }

    #[test]
    fn what_cannot_be_found_out_takes_nothing_away() {
        let (_root, machine) = made_of(&[]);
        assert_eq!(Ours::of(&machine, &cores("0,9")).cores, cores("0,9"));
        let place = Place { core: 9, ..Place::default() };
        assert_eq!(Place::of(&machine, &cores("9")), [place]);
    }

    #[test]
    fn places_are_read_from_the_kernels_files() {
        let (_root, machine) = made_of(&[
            ("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "1,5\n"),
            ("sys/devices/system/node/online", "0-1\n"),
            ("sys/devices/system/node/node1/cpulist", "1,5\n"),
        ]);
        let place = Place { core: 1, siblings: cores("1,5"), node: Some(1) };
        assert_eq!(Place::of(&machine, &cores("1")), [place]);
    }

    #[test]
    fn this_process_has_the_processors_it_may_use() {
        let allowed = Cores::allowed();
        assert_eq!(Ours::of(&Machine::this(), &allowed).cores, allowed);
    }
}
