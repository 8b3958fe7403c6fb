//! Machine description language: `mount nvme0n1p1 /srv; neighbour 0000:5e:00.1 ahci 0x010601`.
//!
//! The empty description has one NVMe function at 0000:5e:00.0 in IOMMU group 12, bound to the
//! kernel's driver, with one blank disk, `nvme0n1`, and its partition `nvme0n1p1`; and vfio-pci.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::kernel_files::KernelFiles;
use crate::pci::{DiskSignature, PciAddress};

pub(super) const FUNCTION: &str = "0000:5e:00.0";
pub(super) const SECOND: &str = "0000:5f:00.0";
pub(super) const SERIAL: &str = "S4EW";

pub(super) struct TestTree {
    root: tempfile::TempDir,
    pub(super) machine: KernelFiles,
}

pub(super) fn test_address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

/// Signatures of a device in a tree: the lines of its file, `member TEXT` or `holds TEXT`.
pub(super) fn disk_signatures(path: &Path) -> Result<Vec<DiskSignature>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.kind().to_string())?;
    let mark = |line: &str| {
        let (kind, text) = line.split_once(' ').unwrap();
        DiskSignature { text: text.into(), is_member: kind == "member" }
    };
    Ok(text.lines().map(mark).collect())
}

impl TestTree {
    pub(super) fn with_functions(words: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let machine = KernelFiles::under_root(root.path());
        let tree = Self { root, machine };
        tree.add_drivers_and_parameters();
        for clause in words.split(';').map(str::trim).filter(|clause| !clause.is_empty()) {
            let words: Vec<&str> = clause.split_whitespace().collect();
            tree.add_group(words[0], &words[1..]);
        }
        tree
    }

    fn add_drivers_and_parameters(&self) {
        for driver in ["nvme", "vfio-pci", "ahci"] {
            self.write_file(&format!("sys/bus/pci/drivers/{driver}/unbind"), "");
        }
        self.write_file("sys/bus/pci/drivers_probe", "");
        self.write_file("sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "N\n");
        self.write_file("proc/sys/kernel/random/boot_id", "2f1c\n");
        self.write_file("proc/sys/kernel/osrelease", "6.12.0\n");
        self.write_file("proc/self/mountinfo", "");
        self.write_file("proc/swaps", "Filename Type Size Used Priority\n");
        self.write_file("run/x", "");
        self.add_function(FUNCTION, "12", "0x010802");
        self.add_controller(FUNCTION, "nvme0", SERIAL);
        self.add_disk(FUNCTION, "nvme0", "nvme0n1", "259:0");
        self.add_partition(FUNCTION, "nvme0", "nvme0n1", 1);
    }

    fn add_group(&self, word: &str, rest: &[&str]) {
        let numbers = self.device_numbers();
        let of = |name: &str| numbers.iter().find(|(own, _)| own == name).unwrap().1.clone();
        match (word, rest) {
            ("mount", [device, at]) => {
                let line = format!("22 1 {} / {at} rw - ext4 /dev/{device} rw\n", of(device));
                self.add_entries("proc/self/mountinfo", &line);
            }
            // A file system on several devices: an anonymous number, and one of them as its source.
            ("mount-many", [device, at]) => {
                let line = format!("22 1 0:44 / {at} rw - btrfs /dev/{device} rw\n");
                self.add_entries("proc/self/mountinfo", &line);
            }
            ("swap", [device]) => {
                self.add_entries("proc/swaps", &format!("/dev/{device} partition 8 0 -2\n"));
            }
            ("mapped", [device, kind, name]) => {
                let dm = format!("sys/dev/block/{}/holders/dm-0", of(device));
                self.write_file(&format!("{dm}/dm/name"), name);
                self.write_file(&format!("{dm}/dm/uuid"), &format!("{kind}-x"));
                self.write_file(&format!("{dm}/dev"), "253:0\n");
                self.write_file("sys/dev/block/253:0/uevent", "DEVNAME=dm-0\n");
            }
            ("mount-mapped", [at]) => {
                let line = format!("23 1 253:0 / {at} rw - xfs /dev/mapper/x rw\n");
                self.add_entries("proc/self/mountinfo", &line);
            }
            ("held", [device, by]) => {
                self.write_file(&format!("sys/dev/block/{}/holders/{by}/size", of(device)), "8\n");
            }
            ("btrfs", [device, uuid]) => {
                self.write_file(&format!("sys/fs/btrfs/{uuid}/devices/{device}/size"), "8\n");
            }
            ("loop", [device]) => {
                self.write_file("sys/block/loop0/loop/backing_file", &format!("/dev/{device}\n"));
            }
            ("exported", [device, subsystem]) => {
                let space = format!("sys/kernel/config/nvmet/subsystems/{subsystem}/namespaces/1");
                self.write_file(&format!("{space}/device_path"), &format!("/dev/{device}\n"));
                self.write_file(&format!("{space}/enable"), "1\n");
            }
            ("open", [process, name, node]) => {
                self.write_file(&format!("proc/{process}/comm"), name);
                self.link(&format!("proc/{process}/fd/3"), node);
            }
            ("closed", [process]) => self.write_file(&format!("proc/{process}/comm"), "x\n"),
            ("member" | "holds", [device, text @ ..]) => {
                self.add_entries(&format!("dev/{device}"), &format!("{word} {}\n", text.join(" ")));
            }
            ("no-node", [device]) => self.remove(&format!("dev/{device}")),
            ("claimed", [device]) => self.write_file(&format!("claimed/{device}"), ""),
            ("locked", [path]) => {
                self.write_file(&format!("locked/{}", path.replace('/', "!")), "")
            }
            ("second-disk", []) => self.add_disk(FUNCTION, "nvme0", "nvme0n2", "259:8"),
            ("second-function", [group]) => {
                self.add_function(SECOND, group, "0x010802");
                self.add_controller(SECOND, "nvme1", "S5XX");
                self.add_disk(SECOND, "nvme1", "nvme1n1", "259:16");
            }
            // One disk of the kernel through one controller or several.
            ("paths", controllers) => self.add_multipath_controllers(controllers),
            ("neighbour", [other, driver, class]) => {
                self.add_function(other, "12", class);
                self.remove(&function_sysfs_path(other, "driver"));
                if *driver != "none" {
                    self.set_driver(other, driver);
                }
            }
            ("no-iommu", []) => self.remove_iommu_groups(FUNCTION),
            ("no-iommu-second", []) => self.remove_iommu_groups(SECOND),
            ("no-switch", []) => self.remove("sys/module/vfio/parameters"),
            ("no-vfio", []) => self.remove("sys/bus/pci/drivers/vfio-pci"),
            ("module", [path]) => {
                self.write_file(
                    "lib/modules/6.12.0/modules.dep",
                    &format!("kernel/drivers/{path}:\n"),
                );
            }
            ("class", [class]) => self.write_file(&function_sysfs_path(FUNCTION, "class"), class),
            ("virtual", [count]) => {
                self.write_file(&function_sysfs_path(FUNCTION, "sriov_numvfs"), count)
            }
            ("override", [driver]) => {
                self.write_file(&function_sysfs_path(FUNCTION, "driver_override"), driver)
            }
            ("driver", [driver]) => {
                self.remove(&function_sysfs_path(FUNCTION, "driver"));
                self.remove(&function_sysfs_path(FUNCTION, "nvme"));
                if *driver != "none" {
                    self.set_driver(FUNCTION, driver);
                }
            }
            ("vmd", [own]) => {
                self.write_file("sys/bus/pci/drivers/vmd/unbind", "");
                self.add_function(own, "12", "0x010802");
            }
            ("gone", []) => self.remove(&function_sysfs_path(FUNCTION, "")),
            other => panic!("no word {other:?}"),
        }
    }

    fn add_function(&self, at: &str, group: &str, class: &str) {
        for (name, text) in [
            ("class", class),
            ("vendor", "0x8086\n"),
            ("device", "0x0a54\n"),
            ("numa_node", "1\n"),
            ("driver_override", "(null)\n"),
        ] {
            self.write_file(&function_sysfs_path(at, name), text);
        }
        self.set_driver(at, "nvme");
        self.link(
            &function_sysfs_path(at, "iommu_group"),
            &format!("../../../kernel/iommu_groups/{group}"),
        );
        self.write_file(&format!("sys/kernel/iommu_groups/{group}/devices/{at}/x"), "");
    }

    fn set_driver(&self, at: &str, driver: &str) {
        self.write_file(&format!("sys/bus/pci/drivers/{driver}/unbind"), "");
        self.link(&function_sysfs_path(at, "driver"), &format!("../../drivers/{driver}"));
    }

    fn remove_iommu_groups(&self, at: &str) {
        self.remove(&function_sysfs_path(at, "iommu_group"));
        self.remove("sys/kernel/iommu_groups");
    }

    fn add_controller(&self, at: &str, name: &str, serial: &str) {
        let directory = function_sysfs_path(at, &format!("nvme/{name}"));
        self.write_file(&format!("{directory}/model"), "Disk 9       \n");
        self.write_file(&format!("{directory}/serial"), &format!("{serial}      \n"));
        self.write_file(&format!("{directory}/state"), "live\n");
        // 4 MiB for submission queues.
        self.write_file(&format!("{directory}/cmbsz"), "16897\n");
    }

    fn add_disk(&self, at: &str, controller: &str, name: &str, number: &str) {
        self.add_disk_at(
            &function_sysfs_path(at, &format!("nvme/{controller}/{name}")),
            name,
            number,
        );
    }

    fn add_disk_at(&self, directory: &str, name: &str, number: &str) {
        self.write_file(&format!("{directory}/dev"), number);
        self.write_file(&format!("{directory}/uevent"), &format!("DEVNAME={name}\n"));
        for link in [format!("sys/block/{name}"), format!("sys/dev/block/{number}")] {
            self.remove(&link);
            let up = "../".repeat(link.matches('/').count());
            self.link(&link, &format!("{up}{directory}"));
        }
        self.write_file(&format!("dev/{name}"), "");
    }

    fn add_partition(&self, at: &str, controller: &str, disk: &str, number: u32) {
        let name = format!("{disk}p{number}");
        let directory = function_sysfs_path(at, &format!("nvme/{controller}/{disk}/{name}"));
        self.add_disk_at(&directory, &name, &format!("259:{number}"));
        self.write_file(&format!("{directory}/partition"), &format!("{number}\n"));
    }

    fn add_multipath_controllers(&self, controllers: &[&str]) {
        self.remove(&function_sysfs_path(FUNCTION, "nvme/nvme0/nvme0n1"));
        self.write_file(&function_sysfs_path(FUNCTION, "nvme/nvme0/nvme0c0n1/size"), "8\n");
        let subsystem = "sys/class/nvme-subsystem/nvme-subsys0";
        self.add_disk_at(&format!("{subsystem}/nvme0n1"), "nvme0n1", "259:0");
        for controller in controllers {
            self.write_file(&format!("{subsystem}/{controller}/state"), "live\n");
        }
    }

    /// Device numbers of the disks and partitions.
    fn device_numbers(&self) -> Vec<(String, String)> {
        let all = self.machine.directory_entries("sys/dev/block").into_iter();
        let named = all.filter_map(|number| {
            let uevent = self.machine.read_trimmed(&format!("sys/dev/block/{number}/uevent"))?;
            Some((uevent.strip_prefix("DEVNAME=")?.to_owned(), number))
        });
        named.collect()
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    pub(super) fn write_file(&self, path: &str, text: &str) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn add_entries(&self, path: &str, text: &str) {
        let before = std::fs::read_to_string(self.path(path)).unwrap();
        self.write_file(path, &format!("{before}{text}"));
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
    pub(super) fn driver_state(&self) -> String {
        let mut state = String::new();
        for at in [FUNCTION, SECOND] {
            let driver = self.machine.link_target_name(&function_sysfs_path(at, "driver"));
            let pinned = self.machine.read_trimmed(&function_sysfs_path(at, "driver_override"));
            state += &format!("{at} driver {driver:?} override {pinned:?}\n");
        }
        let switch = "sys/module/vfio/parameters/enable_unsafe_noiommu_mode";
        let (records, nodes) = (
            self.machine.directory_entries("run/tenmil"),
            self.machine.directory_entries("dev/vfio"),
        );
        state + &format!("{:?} {records:?} {nodes:?}", self.machine.read_trimmed(switch))
    }
}

pub(super) fn function_sysfs_path(at: &str, name: &str) -> String {
    format!("sys/bus/pci/devices/{at}/{name}")
}
