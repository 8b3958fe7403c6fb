//! Fake kernel that changes drivers in a tree.

use std::cell::{Cell, RefCell};
use std::fs::File;

use super::test_tree::{FUNCTION, TestTree, function_sysfs_path};
use crate::Errno;
use crate::kernel_files::KernelFiles;
use crate::pci::BindKernel;

pub(super) struct FakeKernel<'a> {
    pub(super) tree: &'a TestTree,
    /// Remaining modifying calls until the process is gone.
    pub(super) calls_left: Cell<u32>,
    /// Refused call: the end of a path, and the error.
    pub(super) refuses: RefCell<Option<(String, Errno)>>,
    /// Whether no driver binds on a probe.
    pub(super) probes_in_vain: Cell<bool>,
    /// Whether a program, process 41, opens every device node as soon as it exists.
    pub(super) is_awaited: Cell<bool>,
    /// Owners given to device nodes.
    pub(super) given: RefCell<Vec<(String, u32)>>,
}

const SWITCH: &str = "sys/module/vfio/parameters/enable_unsafe_noiommu_mode";

/// Panic payload of a process that is gone.
pub(super) struct SimulatedCrash;

impl<'a> FakeKernel<'a> {
    pub(super) fn new(tree: &'a TestTree) -> Self {
        let (refuses, given) = (RefCell::default(), RefCell::default());
        Self {
            tree,
            calls_left: Cell::new(u32::MAX),
            refuses,
            probes_in_vain: Cell::new(false),
            is_awaited: Cell::new(false),
            given,
        }
    }

    fn count_call_or_crash(&self, path: &str) -> Result<(), Errno> {
        let left = self.calls_left.get();
        if left == 0 {
            std::panic::resume_unwind(Box::new(SimulatedCrash));
        }
        self.calls_left.set(left - 1);
        match &*self.refuses.borrow() {
            Some((end, errno)) if path.ends_with(end.as_str()) => Err(*errno),
            _ => Ok(()),
        }
    }

    fn unbind(&self, driver: &str, at: &str) -> Result<(), Errno> {
        if self.tree.machine.link_target_name(&function_sysfs_path(at, "driver")).as_deref()
            != Some(driver)
        {
            return Err(Errno::NODEV);
        }
        self.tree.remove(&function_sysfs_path(at, "driver"));
        match driver {
            "nvme" => self.rename(at, "nvme", ".nvme"),
            _ => {
                self.vfio_nodes(at).iter().for_each(|node| self.tree.remove(node));
                self.leave_group(at);
            }
        }
        Ok(())
    }

    fn probe(&self, at: &str) -> Result<(), Errno> {
        let machine = &self.tree.machine;
        if !machine.exists(&function_sysfs_path(at, "class")) {
            return Err(Errno::NODEV);
        }
        let pinned = machine.read_trimmed(&function_sysfs_path(at, "driver_override")).unwrap();
        let driver = if pinned == "(null)" { "nvme".to_owned() } else { pinned };
        let has_node = machine.link_target_name(&function_sysfs_path(at, "iommu_group")).is_some()
            || machine.read_trimmed(SWITCH).as_deref() == Some("Y");
        let is_there = machine.exists(&format!("sys/bus/pci/drivers/{driver}"));
        if self.probes_in_vain.take() {
            return Ok(());
        }
        let is_free = machine.link_target_name(&function_sysfs_path(at, "driver")).is_none();
        // The kernel does not report that no driver was bound.
        if is_there && is_free && (driver != "vfio-pci" || has_node) {
            self.tree.link(&function_sysfs_path(at, "driver"), &format!("../../drivers/{driver}"));
            match driver.as_str() {
                "nvme" => self.rename(at, ".nvme", "nvme"),
                "vfio-pci" => {
                    self.join_group(at);
                    self.vfio_nodes(at).iter().for_each(|node| self.tree.write_file(node, ""));
                    if self.is_awaited.get() {
                        self.tree.write_file("proc/41/comm", "tenmil\n");
                        let open =
                            |node: &String| self.tree.link("proc/41/fd/9", &format!("/{node}"));
                        self.vfio_nodes(at).iter().for_each(open);
                    }
                    self.tree.write_file(&function_sysfs_path(at, "vfio-dev/vfio0/x"), "");
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn vfio_nodes(&self, at: &str) -> Vec<String> {
        let group = self.tree.machine.link_target_name(&function_sysfs_path(at, "iommu_group"));
        let node = group.map(|group| match self.is_iommu_group(&group) {
            true => format!("dev/vfio/{group}"),
            false => format!("dev/vfio/noiommu-{group}"),
        });
        node.into_iter().collect()
    }

    fn is_iommu_group(&self, group: &str) -> bool {
        !self.tree.machine.exists(&format!("sys/kernel/iommu_groups/{group}/name"))
    }

    /// In no-IOMMU mode VFIO creates a group for each bound function.
    fn join_group(&self, at: &str) {
        if self.tree.machine.link_target_name(&function_sysfs_path(at, "iommu_group")).is_none() {
            let number = if at == FUNCTION { 7 } else { 8 };
            let group = format!("sys/kernel/iommu_groups/{number}");
            self.tree.write_file(&format!("{group}/name"), "vfio-noiommu\n");
            self.tree.write_file(&format!("{group}/devices/{at}/x"), "");
            self.tree
                .link(&function_sysfs_path(at, "iommu_group"), &format!("../../../../{group}"));
        }
    }

    fn leave_group(&self, at: &str) {
        let group = self.tree.machine.link_target_name(&function_sysfs_path(at, "iommu_group"));
        if let Some(group) = group.filter(|group| !self.is_iommu_group(group)) {
            self.tree.remove(&function_sysfs_path(at, "iommu_group"));
            self.tree.remove(&format!("sys/kernel/iommu_groups/{group}"));
        }
    }

    fn rename(&self, at: &str, from: &str, to: &str) {
        let path = |name| self.tree.path(&function_sysfs_path(at, name));
        // A function that never had a kernel driver has nothing to move.
        let _ = std::fs::rename(path(from), path(to));
    }
}

impl BindKernel for FakeKernel<'_> {
    fn kernel_files(&self) -> &KernelFiles {
        &self.tree.machine
    }

    fn write_file(&self, path: &str, value: &str) -> Result<(), Errno> {
        self.count_call_or_crash(path)?;
        if let Some(driver) = path.strip_prefix("sys/bus/pci/drivers/") {
            return self.unbind(driver.strip_suffix("/unbind").unwrap(), value);
        }
        if path == "sys/bus/pci/drivers_probe" {
            return self.probe(value);
        }
        let text = if value == "\n" { "(null)\n" } else { value };
        self.tree.machine.write_value(path, text)
    }

    fn is_writable(&self, path: &str) -> bool {
        !self.tree.machine.exists(&format!("locked/{}", path.replace('/', "!")))
    }

    fn open_exclusive(&self, node: &str) -> Result<File, Errno> {
        let name = node.strip_prefix("dev/").unwrap();
        if self.tree.machine.exists(&format!("claimed/{name}")) {
            return Err(Errno::BUSY);
        }
        File::open(self.tree.path(node)).map_err(|_| Errno::NOENT)
    }

    fn change_owner(&self, node: &str, uid: u32) -> Result<(), Errno> {
        self.count_call_or_crash(node)?;
        if !self.tree.machine.exists(node) {
            return Err(Errno::NOENT);
        }
        self.given.borrow_mut().push((node.into(), uid));
        Ok(())
    }
}
