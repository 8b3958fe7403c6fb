//! Readers for `/proc` and `/sys`.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

use rustix::io::Errno;

use crate::CpuList;

/// Root of `/proc` and `/sys`. Missing files read as `None`.
#[derive(Clone, Debug)]
pub struct KernelFiles {
    root: PathBuf,
}

impl KernelFiles {
    /// The machine that runs this process.
    pub fn live_system() -> Self {
        Self { root: "/".into() }
    }

    /// A machine whose `/proc` and `/sys` are under `root`, for tests.
    pub fn under_root(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Path of a kernel file. `path` has no leading slash, here and below.
    pub fn path_of(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Content of a file, trimmed.
    pub fn read_trimmed(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }

    /// Content of a binary file, as far as it is readable.
    pub fn read_bytes(&self, path: &str) -> Option<Vec<u8>> {
        std::fs::read(self.root.join(path)).ok()
    }

    /// Last component of a link's target.
    pub fn link_target_name(&self, path: &str) -> Option<String> {
        let to = std::fs::read_link(self.root.join(path)).ok()?;
        to.file_name()?.to_str().map(str::to_owned)
    }

    /// Writes a value to an existing file.
    pub fn write_value(&self, path: &str, value: &str) -> Result<(), Errno> {
        let opened = OpenOptions::new().write(true).truncate(true).open(self.root.join(path));
        let refuse = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        opened.and_then(|mut file| file.write_all(value.as_bytes())).map_err(refuse)
    }

    /// Content of a file that holds one number.
    pub fn read_number(&self, path: &str) -> Option<u64> {
        self.read_trimmed(path)?.parse().ok()
    }

    /// Content of a file that holds a CPU list.
    pub fn read_cpu_list(&self, path: &str) -> Option<CpuList> {
        CpuList::parse(&self.read_trimmed(path)?).ok()
    }

    /// Sorted names in a directory; empty if it does not exist.
    pub fn directory_entries(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    /// Whether a file or directory exists.
    pub fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// Online CPUs.
    pub fn online_cpus(&self) -> Option<CpuList> {
        self.read_cpu_list("sys/devices/system/cpu/online")
    }

    /// Isolated CPUs (`isolcpus=`).
    pub fn isolated_cpus(&self) -> Option<CpuList> {
        self.read_cpu_list("sys/devices/system/cpu/isolated")
    }

    /// CPUs that share a physical core with `core`, including itself.
    pub fn hyperthread_siblings(&self, core: u32) -> Option<CpuList> {
        self.read_cpu_list(&format!(
            "sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        ))
    }

    /// NUMA node of `core`.
    pub fn numa_node(&self, core: u32) -> Option<u32> {
        let of_node =
            |node| self.read_cpu_list(&format!("sys/devices/system/node/node{node}/cpulist"));
        let nodes = self.read_cpu_list("sys/devices/system/node/online")?;
        nodes.iter().find(|node| of_node(*node).is_some_and(|cores| cores.contains(core)))
    }

    /// First value of a key in `/proc/cpuinfo`.
    pub fn cpuinfo_value(&self, key: &str) -> Option<String> {
        let text = self.read_trimmed("proc/cpuinfo")?;
        let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
        pairs.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_owned())
    }

    /// Value of a key in `/proc/meminfo`, without its unit.
    pub fn meminfo_value(&self, key: &str) -> Option<u64> {
        let text = self.read_trimmed("proc/meminfo")?;
        let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
        let value = pairs.find(|(name, _)| *name == key)?.1.split_whitespace().next()?;
        value.parse().ok()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::KernelFiles;
    use crate::CpuList;

    /// A machine made of these files.
    pub(crate) fn fake_kernel_files(files: &[(&str, &str)]) -> (tempfile::TempDir, KernelFiles) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let machine = KernelFiles::under_root(root.path());
        (root, machine)
    }

    #[test]
    fn topology_is_read_from_sysfs() {
        let (_root, machine) = fake_kernel_files(&[
            ("sys/devices/system/cpu/online", "0-7\n"),
            ("sys/devices/system/cpu/isolated", "\n"),
            ("sys/devices/system/cpu/cpu2/topology/thread_siblings_list", "2,6\n"),
            ("sys/devices/system/node/online", "0-1\n"),
            ("sys/devices/system/node/node0/cpulist", "0-1,4-5\n"),
            ("sys/devices/system/node/node1/cpulist", "2-3,6-7\n"),
        ]);
        assert_eq!(machine.online_cpus().map(|cores| cores.len()), Some(8));
        assert_eq!(machine.isolated_cpus(), None, "an empty list is none");
        assert_eq!(machine.hyperthread_siblings(2), CpuList::parse("2,6").ok());
        assert_eq!(machine.hyperthread_siblings(3), None);
        assert_eq!(
            (machine.numa_node(5), machine.numa_node(6), machine.numa_node(9)),
            (Some(0), Some(1), None)
        );
    }

    #[test]
    fn keys_of_cpuinfo_and_meminfo_are_found() {
        let (_root, machine) = fake_kernel_files(&[
            ("proc/cpuinfo", "processor\t: 0\nmodel name\t: A: fast one\n\nprocessor\t: 1\n"),
            ("proc/meminfo", "HugePages_Total:      16\nHugePages_Free:       12\n"),
        ]);
        assert_eq!(machine.cpuinfo_value("model name").as_deref(), Some("A: fast one"));
        assert_eq!(machine.cpuinfo_value("flags"), None);
        assert_eq!(machine.meminfo_value("HugePages_Free"), Some(12));
        assert_eq!(machine.meminfo_value("HugePages"), None);
    }

    #[test]
    fn this_machine_has_readable_kernel_files() {
        let machine = KernelFiles::live_system();
        let online = machine.online_cpus().unwrap();
        assert!(CpuList::allowed_cpus().iter().all(|core| online.contains(core)));
        assert!(machine.exists("proc/self") && !machine.exists("proc/no such file"));
    }
}
