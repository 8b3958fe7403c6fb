//! Bind planning: obstacles and steps.

use std::fs::File;
use std::path::Path;

use super::bind_kernel::BindKernel;
use super::bind_obstacle::NO_IOMMU_PARAMETER;
use super::bind_records::{functions_bound_by_tenmil, original_binding};
use super::bind_step::PROBE;
use super::nvme_function::{KernelDisk, sysfs_directory};
use super::{BindError, BindObstacle, BindStep, GroupMember, NvmeFunction, PciAddress, VFIO};
use crate::Errno;
use crate::kernel_files::KernelFiles;

/// Options of bind.
#[derive(Clone, Copy)]
pub struct BindRequest<'a> {
    /// User that becomes owner of the VFIO device nodes.
    pub owner: Option<u32>,
    /// Whether to bind without an IOMMU, if there is none.
    pub no_iommu: bool,
    /// Serial numbers of disks to be unbound although they are in use.
    pub even_if_in_use: &'a [String],
    /// Reads the signatures of the device or partition at a path.
    pub signatures: &'a dyn Fn(&Path) -> Result<Vec<DiskSignature>, String>,
}

/// Signature found on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSignature {
    /// Description: `ZFS member "tank"`.
    pub text: String,
    /// Whether it marks a member of an array or pool, or something that the kernel assembles
    /// automatically.
    pub is_member: bool,
}

/// Result of planning for one function.
#[derive(Debug)]
pub struct BindPlan {
    /// Address.
    pub address: PciAddress,
    /// The function, if it exists.
    pub function: Option<NvmeFunction>,
    /// Obstacles. Empty if it can be bound.
    pub obstacles: Vec<BindObstacle>,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// Steps. Empty if the function is available already.
    pub steps: Vec<BindStep>,
    /// Exclusively opened disks: no other use can begin while these are open.
    pub(super) claims: Vec<File>,
}

impl BindPlan {
    /// An empty plan for an address.
    pub fn empty_plan(address: PciAddress) -> Self {
        let (obstacles, notes, claims) = (Vec::new(), Vec::new(), Vec::new());
        Self { address, function: None, obstacles, notes, steps: Vec::new(), claims }
    }

    /// Whether its steps unbind a driver, and do not only change device node owners.
    pub(super) fn is_unbinding(&self) -> bool {
        self.steps.iter().any(|step| !matches!(step, BindStep::Chown { .. }))
    }
}

/// Plans the binding of a set of functions. Changes nothing.
///
/// # Errors
///
/// If a serial number was given that none of them has, or a record is malformed.
pub fn plan_bind(
    kernel: &dyn BindKernel,
    addresses: &[PciAddress],
    terms: &BindRequest<'_>,
) -> Result<Vec<BindPlan>, BindError> {
    let machine = kernel.kernel_files();
    let functions: Vec<Option<NvmeFunction>> =
        addresses.iter().map(|address| NvmeFunction::at_address(machine, *address)).collect();
    let serials: Vec<&str> = functions.iter().flatten().filter_map(NvmeFunction::serial).collect();
    let wrong = terms.even_if_in_use.iter().find(|said| !serials.contains(&said.as_str()));
    if let Some(found) = wrong {
        return Err(BindError::WrongSerial { found: found.clone() });
    }
    let together: Vec<NvmeFunction> = functions.iter().flatten().cloned().collect();
    let mut look = BindInspection { kernel, terms, together: &together };
    addresses
        .iter()
        .zip(functions)
        .map(|(address, function)| look.plan_at(*address, function))
        .collect()
}

/// Inspection of a set of functions.
struct BindInspection<'a> {
    kernel: &'a dyn BindKernel,
    terms: &'a BindRequest<'a>,
    together: &'a [NvmeFunction],
}

impl BindInspection<'_> {
    fn plan_at(
        &mut self,
        address: PciAddress,
        function: Option<NvmeFunction>,
    ) -> Result<BindPlan, BindError> {
        let mut verdict = BindPlan::empty_plan(address);
        let Some(function) = function else {
            verdict.obstacles.push(self.missing_function_obstacle(address));
            return Ok(verdict);
        };
        verdict.steps = self.plan_steps(&function)?;
        if !verdict.steps.is_empty() {
            self.check_permission(&function, &mut verdict);
            if function.driver.as_deref() != Some(VFIO) {
                self.check_users(&function, &mut verdict);
            }
            self.check_isolation(&function, &mut verdict);
            self.check_driver(&mut verdict);
        }
        verdict.function = Some(function);
        Ok(verdict)
    }

    fn missing_function_obstacle(&self, address: PciAddress) -> BindObstacle {
        let machine = self.kernel.kernel_files();
        match NvmeFunction::class_code_at(machine, address) {
            Some(class) => BindObstacle::NotNvme { class },
            None => {
                let all = NvmeFunction::all_nvme_functions(machine);
                BindObstacle::NotFound { others: all.iter().map(|one| one.address).collect() }
            }
        }
    }

    fn check_permission(&self, function: &NvmeFunction, verdict: &mut BindPlan) {
        let own = format!("{}/driver_override", sysfs_directory(function.address));
        let needed = [own.as_str(), PROBE];
        if let Some(path) = needed.into_iter().find(|path| !self.kernel.is_writable(path)) {
            verdict.obstacles.push(BindObstacle::NoPermission { path: path.into() });
        }
    }

    /// Collects the users of its disks, and signatures that need them.
    fn check_users(&self, function: &NvmeFunction, verdict: &mut BindPlan) {
        let may_be_taken = function
            .serial()
            .is_some_and(|own| self.terms.even_if_in_use.iter().any(|one| one == own));
        let mut found = Vec::new();
        let openers = function.disk_users(self.kernel.kernel_files());
        if openers.hidden > 0 {
            let hidden = openers.hidden;
            verdict.notes.push(format!("what {hidden} processes have open cannot be seen"));
        }
        for disk in &function.disks {
            self.check_multipath_controllers(disk, &mut found);
            self.check_disk_signatures(disk, verdict, &mut found);
            // EBUSY means any use by the kernel; reported only if no user has been found otherwise.
            let is_named = openers.found.iter().any(|used| used.is_user_of_disk(&disk.name));
            match self.kernel.open_exclusive(&format!("dev/{}", disk.name)) {
                Ok(claim) => verdict.claims.push(claim),
                Err(Errno::BUSY) if !is_named => {
                    found.push(BindObstacle::Claimed { disk: disk.name.clone() });
                }
                // Reported above as unreadable, or as in use.
                Err(_) => {}
            }
        }
        if !openers.found.is_empty() {
            found.insert(0, BindObstacle::InUse { uses: openers.found });
        }
        // A named serial number overrides these obstacles; they become notes.
        if may_be_taken {
            verdict.claims.clear();
            verdict.notes.extend(found.iter().map(|one| format!("taken all the same: {one}")));
        } else {
            verdict.obstacles.extend(found);
        }
    }

    fn check_multipath_controllers(&self, disk: &KernelDisk, found: &mut Vec<BindObstacle>) {
        let taken: Vec<&str> = self
            .together
            .iter()
            .filter_map(|function| Some(function.controller.as_ref()?.name.as_str()))
            .collect();
        if disk.controllers.iter().any(|name| !taken.contains(&name.as_str())) {
            let (disk, controllers) = (disk.name.clone(), disk.controllers.clone());
            found.push(BindObstacle::SeveralPaths { disk, controllers });
        }
    }

    fn check_disk_signatures(
        &self,
        disk: &KernelDisk,
        verdict: &mut BindPlan,
        found: &mut Vec<BindObstacle>,
    ) {
        let machine = self.kernel.kernel_files();
        let parts = disk.partitions(machine);
        for name in core::iter::once(&disk.name).chain(&parts) {
            match (self.terms.signatures)(&machine.path_of(&format!("dev/{name}"))) {
                Err(why) => found.push(BindObstacle::Unreadable { disk: name.clone(), why }),
                Ok(marks) => {
                    for mark in marks {
                        if mark.is_member {
                            found.push(BindObstacle::Member {
                                disk: name.clone(),
                                signature: mark.text,
                            });
                        } else {
                            verdict.notes.push(format!("{name} holds {}", mark.text));
                        }
                    }
                }
            }
        }
    }

    /// Checks the isolation from the rest of the machine.
    fn check_isolation(&self, function: &NvmeFunction, verdict: &mut BindPlan) {
        let machine = self.kernel.kernel_files();
        let address = function.address;
        if function.virtual_functions > 0 {
            let count = function.virtual_functions;
            verdict.obstacles.push(BindObstacle::VirtualFunctions { address, count });
        }
        // Domains above 0xffff are created by a driver.
        if address.domain() > u32::from(u16::MAX) && machine.exists("sys/bus/pci/drivers/vmd") {
            verdict.obstacles.push(BindObstacle::BehindVmd { domain: address.domain() });
            return;
        }
        let Some(group) = &function.group else {
            if !self.terms.no_iommu {
                verdict.obstacles.push(BindObstacle::NoIommu);
            } else if !machine.exists(NO_IOMMU_PARAMETER) {
                verdict.obstacles.push(BindObstacle::NoIommuMode);
            } else {
                verdict.notes.push(NO_IOMMU_WARNING.into());
            }
            return;
        };
        let others: Vec<GroupMember> = group
            .others
            .iter()
            .filter(|other| !is_harmless_group_member(other) && !self.is_in_request(&other.address))
            .cloned()
            .collect();
        if !others.is_empty() {
            verdict.obstacles.push(BindObstacle::SharedGroup { group: group.number, others });
        }
    }

    fn is_in_request(&self, address: &str) -> bool {
        self.together.iter().any(|function| function.address.to_string() == address)
    }

    fn check_driver(&self, verdict: &mut BindPlan) {
        let machine = self.kernel.kernel_files();
        if machine.exists(&format!("sys/bus/pci/drivers/{VFIO}")) {
            return;
        }
        let release = machine.read_trimmed("proc/sys/kernel/osrelease").unwrap_or_default();
        let modules = machine.read_trimmed(&format!("lib/modules/{release}/modules.dep"));
        let is_loadable = modules.is_some_and(|text| text.contains("/vfio-pci.ko"));
        verdict.obstacles.push(BindObstacle::NoVfio { release, is_loadable });
    }

    fn plan_steps(&self, function: &NvmeFunction) -> Result<Vec<BindStep>, BindError> {
        let machine = self.kernel.kernel_files();
        let give = self.terms.owner.map(|uid| BindStep::Chown { uid });
        // In no-IOMMU mode the device nodes require CAP_SYS_RAWIO, regardless of their owner.
        let give = give.filter(|_| function.group.is_some());
        let known = original_binding(machine, function.address)?;
        // Bound already: only the owner of the device nodes may have to change.
        if function.driver.as_deref() == Some(VFIO) {
            return Ok(give.into_iter().collect());
        }
        let mut steps = Vec::new();
        let switch = machine.read_trimmed(NO_IOMMU_PARAMETER).filter(|_| function.group.is_none());
        let is_off = switch.as_deref().is_some_and(|text| text != "Y");
        // An existing record holds the original state and must not be overwritten.
        if known.is_none() {
            steps.push(BindStep::Record {
                driver: function.driver.clone(),
                driver_override: function.driver_override.clone(),
                // The last function to be returned restores the parameter.
                no_iommu: if is_off {
                    switch
                } else {
                    switch.and_then(|_| recorded_no_iommu(machine))
                },
            });
        }
        if is_off {
            steps.push(BindStep::NoIommu { to: "Y".into() });
        }
        steps.push(BindStep::Override { driver: Some(VFIO.into()) });
        steps.extend(function.driver.clone().map(|driver| BindStep::Unbind { driver }));
        steps.push(BindStep::Probe { driver: VFIO.into() });
        steps.extend(give);
        Ok(steps)
    }
}

/// Bridges, unbound functions and those of user-space drivers do not make a group unusable (drivers
/// that leave DMA to their user: vfio-pci, pci-stub, pcieport).
fn is_harmless_group_member(other: &GroupMember) -> bool {
    let driver = other.driver.as_deref();
    other.is_bridge || driver.is_none_or(|name| [VFIO, "pci-stub", "pcieport"].contains(&name))
}

/// Original value of the no-IOMMU parameter, recorded for another function.
fn recorded_no_iommu(machine: &KernelFiles) -> Option<String> {
    functions_bound_by_tenmil(machine)
        .into_iter()
        .find_map(|other| original_binding(machine, other).ok()??.no_iommu)
}

const NO_IOMMU_WARNING: &str = "without an IOMMU the device, and so the process that drives it, can read and \
    write all memory of this machine; the kernel marks itself as tainted, and only root may drive it";
