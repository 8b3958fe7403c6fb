//! What the kernel writes about the machine under `/proc` and `/sys`.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

use rustix::io::Errno;

use crate::Cores;

/// A machine, as the files of its kernel describe it. Whatever is not there reads as `None`.
#[derive(Clone, Debug)]
pub struct Machine {
    root: PathBuf,
}

impl Machine {
    /// The machine this runs on.
    pub fn this() -> Self {
        Self { root: "/".into() }
    }

    /// A machine whose `/proc` and `/sys` lie under `root`.
    pub fn under(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Where a file of it lies for this process. `path` has no leading slash, here and below.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// The contents of a file, without the white space around them.
    pub fn text(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }

    /// The contents of a file that is not text, as much of it as we may read.
    pub fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        std::fs::read(self.root.join(path)).ok()
    }

    /// The last name in what a link points to.
    pub fn link(&self, path: &str) -> Option<String> {
        let to = std::fs::read_link(self.root.join(path)).ok()?;
        to.file_name()?.to_str().map(str::to_owned)
    }

    /// Writes a value into a file that is there.
    pub fn write(&self, path: &str, value: &str) -> Result<(), Errno> {
        let opened = OpenOptions::new().write(true).truncate(true).open(self.root.join(path));
        let refuse = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        opened.and_then(|mut file| file.write_all(value.as_bytes())).map_err(refuse)
    }

    /// A file that holds one number.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// A file that holds a list of processors.
    pub fn cores(&self, path: &str) -> Option<Cores> {
        Cores::parse(&self.text(path)?).ok()
    }

    /// The names in a directory, in order; none if there is no such directory.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Whether a file or directory exists.
    pub fn has(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// The processors that are switched on.
    pub fn online(&self) -> Option<Cores> {
        self.cores("sys/devices/system/cpu/online")
    }

    /// The processors that the scheduler leaves alone (`isolcpus=`).
    pub fn isolated(&self) -> Option<Cores> {
        self.cores("sys/devices/system/cpu/isolated")
    }

    /// The processors that share a physical core with `core`, itself included.
    pub fn siblings(&self, core: u32) -> Option<Cores> {
        self.cores(&format!("sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
    }

    /// The memory node that `core` is near to.
    pub fn node(&self, core: u32) -> Option<u32> {
        let of_node = |node| self.cores(&format!("sys/devices/system/node/node{node}/cpulist"));
        let nodes = self.cores("sys/devices/system/node/online")?;
        nodes.iter().find(|node| of_node(*node).is_some_and(|cores| cores.contains(core)))
    }

    /// The first value of a key in `/proc/cpuinfo`.
    pub fn processor(&self, key: &str) -> Option<String> {
        let text = self.text("proc/cpuinfo")?;
        let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
        pairs.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_owned())
    }

    /// A value of `/proc/meminfo`, as the number that stands there.
    pub fn memory(&self, key: &str) -> Option<u64> {
        let text = self.text("proc/meminfo")?;
        let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
        let value = pairs.find(|(name, _)| *name == key)?.1.split_whitespace().next()?;
        value.parse().ok()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::Machine;
    use crate::Cores;

    /// A machine made of these files.
    pub(crate) fn made_of(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let machine = Machine::under(root.path());
        (root, machine)
    }

    #[test]
    fn topology_is_read_from_the_kernels_files() {
        let (_root, machine) = made_of(&[
            ("sys/devices/system/cpu/online", "0-7\n"),
            ("sys/devices/system/cpu/isolated", "\n"),
            ("sys/devices/system/cpu/cpu2/topology/thread_siblings_list", "2,6\n"),
            ("sys/devices/system/node/online", "0-1\n"),
            ("sys/devices/system/node/node0/cpulist", "0-1,4-5\n"),
            ("sys/devices/system/node/node1/cpulist", "2-3,6-7\n"),
        ]);
        assert_eq!(machine.online().map(|cores| cores.len()), Some(8));
        assert_eq!(machine.isolated(), None, "an empty list is none");
        assert_eq!(machine.siblings(2), Cores::parse("2,6").ok());
        assert_eq!(machine.siblings(3), None);
        assert_eq!((machine.node(5), machine.node(6), machine.node(9)), (Some(0), Some(1), None));
    }

    #[test]
    fn keys_are_found_in_proc() {
        let (_root, machine) = made_of(&[
            ("proc/cpuinfo", "processor\t: 0\nmodel name\t: A: fast one\n\nprocessor\t: 1\n"),
            ("proc/meminfo", "HugePages_Total:      16\nHugePages_Free:       12\n"),
        ]);
        assert_eq!(machine.processor("model name").as_deref(), Some("A: fast one"));
        assert_eq!(machine.processor("flags"), None);
        assert_eq!(machine.memory("HugePages_Free"), Some(12));
        assert_eq!(machine.memory("HugePages"), None);
    }

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::this();
        let online = machine.online().unwrap();
        assert!(Cores::allowed().iter().all(|core| online.contains(core)));
        assert!(machine.has("proc/self") && !machine.has("proc/no such file"));
    }
}
