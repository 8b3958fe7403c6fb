//! CPU limits from control groups: quota and cpuset.
//!
//! Both cgroup v1 and v2 are read. A limit applies to all descendants, so the effective limit is
//! the smallest between this process's group and the root.

use crate::{CpuList, kernel_files::KernelFiles};

/// CPU limits of this process's control groups.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CgroupLimits {
    /// CPU quota in CPUs: 1.5 is one and a half. `None` is unlimited.
    pub quota: Option<f64>,
    /// File that sets the quota.
    pub quota_file: Option<String>,
    /// CPUs of the cpuset. `None` if no group sets it.
    pub cpus: Option<CpuList>,
}

/// Mount points of cgroup v2: alone, or beside v1.
const V2_MOUNTS: [&str; 2] = ["sys/fs/cgroup", "sys/fs/cgroup/unified"];

impl CgroupLimits {
    /// Reads the limits of the current process.
    pub fn read(machine: &KernelFiles) -> Self {
        let groups = machine.read_trimmed("proc/self/cgroup").unwrap_or_default();
        let mut limits = Self::default();
        for line in groups.lines() {
            // `4:cpu,cpuacct:/group` in v1, `0::/group` in v2.
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
            if controllers.is_empty() {
                for mount in V2_MOUNTS {
                    limits.read_group(machine, mount, group);
                }
            }
            if controllers.split(',').any(|name| name == "cpu" || name == "cpuset") {
                limits.read_group(machine, &format!("sys/fs/cgroup/{controllers}"), group);
            }
        }
        limits
    }

    /// Reads a group and its ancestors. In a container the path may be relative to the host's root,
    /// where nothing is found; the root of the mount is then the group.
    fn read_group(&mut self, machine: &KernelFiles, mount: &str, group: &str) {
        let mut path = group.trim_matches('/');
        loop {
            let directory = format!("{mount}/{path}");
            let directory = directory.trim_end_matches('/');
            self.read_quota(machine, directory);
            if self.cpus.is_none() {
                let names = ["cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"];
                self.cpus = names
                    .iter()
                    .find_map(|name| machine.read_cpu_list(&format!("{directory}/{name}")));
            }
            if path.is_empty() {
                return;
            }
            path = path.rsplit_once('/').map_or("", |(above, _)| above);
        }
    }

    fn read_quota(&mut self, machine: &KernelFiles, directory: &str) {
        for (file, quota) in [
            ("cpu.max", read_cpu_max_v2(machine, directory)),
            ("cpu.cfs_quota_us", read_cfs_quota_v1(machine, directory)),
        ] {
            let Some(quota) = quota else { continue };
            if self.quota.is_none_or(|smallest| quota < smallest) {
                self.quota = Some(quota);
                self.quota_file = Some(format!("/{directory}/{file}"));
            }
        }
    }
}

/// cgroup v2 `cpu.max`: `150000 100000`, or `max 100000` for no limit.
fn read_cpu_max_v2(machine: &KernelFiles, directory: &str) -> Option<f64> {
    let text = machine.read_trimmed(&format!("{directory}/cpu.max"))?;
    let (quota, period) = text.split_once(' ')?;
    quota_cpus(quota.parse().ok()?, period.parse().ok()?)
}

/// cgroup v1 `cpu.cfs_quota_us` and `cpu.cfs_period_us`; −1 is no limit.
fn read_cfs_quota_v1(machine: &KernelFiles, directory: &str) -> Option<f64> {
    let quota = machine.read_trimmed(&format!("{directory}/cpu.cfs_quota_us"))?.parse().ok()?;
    let period = machine.read_trimmed(&format!("{directory}/cpu.cfs_period_us"))?.parse().ok()?;
    quota_cpus(quota, period)
}

fn quota_cpus(quota_us: f64, period_us: f64) -> Option<f64> {
    (quota_us > 0.0 && period_us > 0.0).then(|| quota_us / period_us)
}

#[cfg(test)]
mod tests {
    use super::CgroupLimits;
    use crate::CpuList;
    use crate::kernel_files::{KernelFiles, tests::fake_kernel_files};

    #[test]
    fn smallest_quota_up_to_the_root_applies() {
        let (_root, machine) = fake_kernel_files(&[
            ("proc/self/cgroup", "0::/outer/inner\n"),
            ("sys/fs/cgroup/outer/cpu.max", "150000 100000\n"),
            ("sys/fs/cgroup/outer/inner/cpu.max", "300000 100000\n"),
            ("sys/fs/cgroup/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/outer/inner/cpuset.cpus.effective", "2-3\n"),
            ("sys/fs/cgroup/cpuset.cpus.effective", "0-3\n"),
        ]);
        let limits = CgroupLimits::read(&machine);
        assert_eq!(limits.quota, Some(1.5));
        assert_eq!(limits.quota_file.as_deref(), Some("/sys/fs/cgroup/outer/cpu.max"));
        assert_eq!(limits.cpus, CpuList::parse("2-3").ok());
    }

    #[test]
    fn cgroup_v1_quota_is_read() {
        let (_root, machine) = fake_kernel_files(&[
            ("proc/self/cgroup", "3:cpuset:/box\n1:cpu,cpuacct:/box\n0::/\n"),
            ("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "50000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpuset/box/cpuset.cpus", "1\n"),
        ]);
        let limits = CgroupLimits::read(&machine);
        assert_eq!(limits.quota, Some(0.5));
        assert_eq!(limits.cpus, CpuList::parse("1").ok());
    }

    #[test]
    fn container_with_host_path_is_read_at_the_mount_root() {
        let (_root, machine) = fake_kernel_files(&[
            ("proc/self/cgroup", "0::/docker/0123\n"),
            ("sys/fs/cgroup/cpu.max", "200000 100000\n"),
        ]);
        assert_eq!(CgroupLimits::read(&machine).quota, Some(2.0));
    }

    #[test]
    fn missing_cgroups_mean_no_limits() {
        let (_root, machine) = fake_kernel_files(&[]);
        assert_eq!(CgroupLimits::read(&machine), CgroupLimits::default());
        CgroupLimits::read(&KernelFiles::live_system());
    }
}
