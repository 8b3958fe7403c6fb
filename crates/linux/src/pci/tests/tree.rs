//! Machine description language: `mount nvme0n1p1 /srv; neighbour 0000:5e:00.1 ahci 0x010601`.
//!
//! The empty description has one NVMe function at 0000:5e:00.0 in IOMMU group 12, bound to the
//! kernel's driver, with one blank disk, `nvme0n1`, and its partition `nvme0n1p1`; and vfio-pci.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::kernel_files::KernelFiles;
use crate::pci::{Address, DiskSignature};

pub(super) const FUNCTION: &str = "0000:5e:00.0";
pub(super) const SECOND: &str = "0000:5f:00.0";
pub(super) const SERIAL: &str = "S4EW";

pub(super) struct Tree {
    root: tempfile::TempDir,
    pub(super) machine: KernelFiles,
}

pub(super) fn address(text: &str) -> Address {
    text.parse().unwrap()
}

/// Signatures of a device in a tree: the lines of its file, `member TEXT` or `holds TEXT`.
pub(super) fn marks(path: &Path) -> Result<Vec<DiskSignature>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.kind().to_string())?;
    let mark = |line: &str| {
        let (kind, text) = line.split_once(' ').unwrap();
        DiskSignature { text: text.into(), is_member: kind == "member" }
    };
    Ok(text.lines().map(mark).collect())
}

impl Tree {
    pub(super) fn of(words: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let machine = KernelFiles::under(root.path());
        let tree = Self { root, machine };
        tree.base();
        for clause in words.split(';').map(str::trim).filter(|clause| !clause.is_empty()) {
            let words: Vec<&str> = clause.split_whitespace().collect();
            tree.clause(words[0], &words[1..]);
        }
        tree
    }

    fn base(&self) {
        for driver in ["nvme", "vfio-pci", "ahci"] {
            self.put(&format!("sys/bus/pci/drivers/{driver}/unbind"), "");
        }
        self.put("sys/bus/pci/drivers_probe", "");
        self.put("sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "N\n");
        self.put("proc/sys/kernel/random/boot_id", "2f1c\n");
        self.put("proc/sys/kernel/osrelease", "6.12.0\n");
        self.put("proc/self/mountinfo", "");
        self.put("proc/swaps", "Filename Type Size Used Priority\n");
        self.put("run/x", "");
        self.function(FUNCTION, "12", "0x010802");
        self.controller(FUNCTION, "nvme0", SERIAL);
        self.disk(FUNCTION, "nvme0", "nvme0n1", "259:0");
        self.partition(FUNCTION, "nvme0", "nvme0n1", 1);
    }

    fn clause(&self, word: &str, rest: &[&str]) {
        let numbers = self.numbers();
        let of = |name: &str| numbers.iter().find(|(own, _)| own == name).unwrap().1.clone();
        match (word, rest) {
            ("mount", [device, at]) => {
                let line = format!("22 1 {} / {at} rw - ext4 /dev/{device} rw\n", of(device));
                self.add("proc/self/mountinfo", &line);
            }
            // A file system on several devices: an anonymous number, and one of them as its source.
            ("mount-many", [device, at]) => {
                let line = format!("22 1 0:44 / {at} rw - btrfs /dev/{device} rw\n");
                self.add("proc/self/mountinfo", &line);
            }
            ("swap", [device]) => {
                self.add("proc/swaps", &format!("/dev/{device} partition 8 0 -2\n"));
            }
            ("mapped", [device, kind, name]) => {
                let dm = format!("sys/dev/block/{}/holders/dm-0", of(device));
                self.put(&format!("{dm}/dm/name"), name);
                self.put(&format!("{dm}/dm/uuid"), &format!("{kind}-x"));
                self.put(&format!("{dm}/dev"), "253:0\n");
                self.put("sys/dev/block/253:0/uevent", "DEVNAME=dm-0\n");
            }
            ("mount-mapped", [at]) => {
                let line = format!("23 1 253:0 / {at} rw - xfs /dev/mapper/x rw\n");
                self.add("proc/self/mountinfo", &line);
            }
            ("held", [device, by]) => {
                self.put(&format!("sys/dev/block/{}/holders/{by}/size", of(device)), "8\n");
            }
            ("btrfs", [device, uuid]) => {
                self.put(&format!("sys/fs/btrfs/{uuid}/devices/{device}/size"), "8\n");
            }
            ("loop", [device]) => {
                self.put("sys/block/loop0/loop/backing_file", &format!("/dev/{device}\n"));
            }
            ("exported", [device, subsystem]) => {
                let space = format!("sys/kernel/config/nvmet/subsystems/{subsystem}/namespaces/1");
                self.put(&format!("{space}/device_path"), &format!("/dev/{device}\n"));
                self.put(&format!("{space}/enable"), "1\n");
            }
            ("open", [process, name, node]) => {
                self.put(&format!("proc/{process}/comm"), name);
                self.link(&format!("proc/{process}/fd/3"), node);
            }
            ("closed", [process]) => self.put(&format!("proc/{process}/comm"), "x\n"),
            ("member" | "holds", [device, text @ ..]) => {
                self.add(&format!("dev/{device}"), &format!("{word} {}\n", text.join(" ")));
            }
            ("no-node", [device]) => self.remove(&format!("dev/{device}")),
            ("claimed", [device]) => self.put(&format!("claimed/{device}"), ""),
            ("locked", [path]) => self.put(&format!("locked/{}", path.replace('/', "!")), ""),
            ("second-disk", []) => self.disk(FUNCTION, "nvme0", "nvme0n2", "259:8"),
            ("second-function", [group]) => {
                self.function(SECOND, group, "0x010802");
                self.controller(SECOND, "nvme1", "S5XX");
                self.disk(SECOND, "nvme1", "nvme1n1", "259:16");
            }
            // One disk of the kernel through one controller or several.
            ("paths", controllers) => self.paths(controllers),
            ("neighbour", [other, driver, class]) => {
                self.function(other, "12", class);
                self.remove(&function(other, "driver"));
                if *driver != "none" {
                    self.driver(other, driver);
                }
            }
            ("no-iommu", []) => self.no_iommu(FUNCTION),
            ("no-iommu-second", []) => self.no_iommu(SECOND),
            ("no-switch", []) => self.remove("sys/module/vfio/parameters"),
            ("no-vfio", []) => self.remove("sys/bus/pci/drivers/vfio-pci"),
            ("module", [path]) => {
                self.put("lib/modules/6.12.0/modules.dep", &format!("kernel/drivers/{path}:\n"));
            }
            ("class", [class]) => self.put(&function(FUNCTION, "class"), class),
            ("virtual", [count]) => self.put(&function(FUNCTION, "sriov_numvfs"), count),
            ("override", [driver]) => self.put(&function(FUNCTION, "driver_override"), driver),
            ("driver", [driver]) => {
                self.remove(&function(FUNCTION, "driver"));
                self.remove(&function(FUNCTION, "nvme"));
                if *driver != "none" {
                    self.driver(FUNCTION, driver);
                }
            }
            ("vmd", [own]) => {
                self.put("sys/bus/pci/drivers/vmd/unbind", "");
                self.function(own, "12", "0x010802");
            }
            ("gone", []) => self.remove(&function(FUNCTION, "")),
            other => panic!("no word {other:?}"),
        }
    }

    fn function(&self, at: &str, group: &str, class: &str) {
        for (name, text) in [
            ("class", class),
            ("vendor", "0x8086\n"),
            ("device", "0x0a54\n"),
            ("numa_node", "1\n"),
            ("driver_override", "(null)\n"),
        ] {
            self.put(&function(at, name), text);
        }
        self.driver(at, "nvme");
        self.link(&function(at, "iommu_group"), &format!("../../../kernel/iommu_groups/{group}"));
        self.put(&format!("sys/kernel/iommu_groups/{group}/devices/{at}/x"), "");
    }

    fn driver(&self, at: &str, driver: &str) {
        self.put(&format!("sys/bus/pci/drivers/{driver}/unbind"), "");
        self.link(&function(at, "driver"), &format!("../../drivers/{driver}"));
    }

    fn no_iommu(&self, at: &str) {
        self.remove(&function(at, "iommu_group"));
        self.remove("sys/kernel/iommu_groups");
    }

    fn controller(&self, at: &str, name: &str, serial: &str) {
        let directory = function(at, &format!("nvme/{name}"));
        self.put(&format!("{directory}/model"), "Disk 9       \n");
        self.put(&format!("{directory}/serial"), &format!("{serial}      \n"));
        self.put(&format!("{directory}/state"), "live\n");
        // 4 MiB for submission queues.
        self.put(&format!("{directory}/cmbsz"), "16897\n");
    }

    fn disk(&self, at: &str, controller: &str, name: &str, number: &str) {
        self.disk_in(&function(at, &format!("nvme/{controller}/{name}")), name, number);
    }

    fn disk_in(&self, directory: &str, name: &str, number: &str) {
        self.put(&format!("{directory}/dev"), number);
        self.put(&format!("{directory}/uevent"), &format!("DEVNAME={name}\n"));
        for link in [format!("sys/block/{name}"), format!("sys/dev/block/{number}")] {
            self.remove(&link);
            let up = "../".repeat(link.matches('/').count());
            self.link(&link, &format!("{up}{directory}"));
        }
        self.put(&format!("dev/{name}"), "");
    }

    fn partition(&self, at: &str, controller: &str, disk: &str, number: u32) {
        let name = format!("{disk}p{number}");
        let directory = function(at, &format!("nvme/{controller}/{disk}/{name}"));
        self.disk_in(&directory, &name, &format!("259:{number}"));
        self.put(&format!("{directory}/partition"), &format!("{number}\n"));
    }

    fn paths(&self, controllers: &[&str]) {
        self.remove(&function(FUNCTION, "nvme/nvme0/nvme0n1"));
        self.put(&function(FUNCTION, "nvme/nvme0/nvme0c0n1/size"), "8\n");
        let subsystem = "sys/class/nvme-subsystem/nvme-subsys0";
        self.disk_in(&format!("{subsystem}/nvme0n1"), "nvme0n1", "259:0");
        for controller in controllers {
            self.put(&format!("{subsystem}/{controller}/state"), "live\n");
        }
    }

    /// Device numbers of the disks and partitions.
    fn numbers(&self) -> Vec<(String, String)> {
        let all = self.machine.names("sys/dev/block").into_iter();
        let named = all.filter_map(|number| {
            let uevent = self.machine.text(&format!("sys/dev/block/{number}/uevent"))?;
            Some((uevent.strip_prefix("DEVNAME=")?.to_owned(), number))
        });
        named.collect()
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    pub(super) fn put(&self, path: &str, text: &str) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn add(&self, path: &str, text: &str) {
        let before = std::fs::read_to_string(self.path(path)).unwrap();
        self.put(path, &format!("{before}{text}"));
    }

    pub(super) fn link(&self, path: &str, to: &str) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(to, path).unwrap();
    }

    pub(super) fn remove(&self, path: &str) {
        let path = self.path(path);
        if path.is_dir() && !path.is_symlink() {
            std::fs::remove_dir_all(path).unwrap();
        } else {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Everything that binding may change, as text.
    pub(super) fn state(&self) -> String {
        let mut state = String::new();
        for at in [FUNCTION, SECOND] {
            let driver = self.machine.link(&function(at, "driver"));
            let pinned = self.machine.text(&function(at, "driver_override"));
            state += &format!("{at} driver {driver:?} override {pinned:?}\n");
        }
        let switch = "sys/module/vfio/parameters/enable_unsafe_noiommu_mode";
        let (records, doors) = (self.machine.names("run/tenmil"), self.machine.names("dev/vfio"));
        state + &format!("{:?} {records:?} {doors:?}", self.machine.text(switch))
    }
}

pub(super) fn function(at: &str, name: &str) -> String {
    format!("sys/bus/pci/devices/{at}/{name}")
}
