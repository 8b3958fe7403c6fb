//! Whether a function may be taken from the kernel, and by which steps.

use std::fs::File;
use std::path::Path;

use super::function::{Disk, directory};
use super::kernel::Kernel;
use super::ledger::{former, recorded};
use super::obstacle::NO_IOMMU_SWITCH;
use super::step::PROBE;
use super::{Address, BindError, Function, Neighbour, Obstacle, Step, VFIO};
use crate::Errno;
use crate::machine::Machine;

/// What whoever asks for a function has said.
#[derive(Clone, Copy)]
pub struct Terms<'a> {
    /// The user who is to have the doors to it.
    pub owner: Option<u32>,
    /// That it is to be taken without an IOMMU, if there is none.
    pub no_iommu: bool,
    /// Serial numbers of disks that are to be taken from whoever uses them.
    pub even_if_in_use: &'a [String],
    /// Tells which marks the device or partition at a path bears.
    pub marks: &'a dyn Fn(&Path) -> Result<Vec<Mark>, String>,
}

/// A mark that somebody has left on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// What it says: `ZFS member "tank"`.
    pub text: String,
    /// Whether it is of something that is made of several disks, or that the kernel puts together by
    /// itself.
    pub is_member: bool,
}

/// What became of looking at a function.
#[derive(Debug)]
pub struct Verdict {
    /// Where it sits.
    pub address: Address,
    /// What it is, if it is there.
    pub function: Option<Function>,
    /// Why it is not taken. Empty if it is.
    pub obstacles: Vec<Obstacle>,
    /// What whoever asks should know.
    pub notes: Vec<String>,
    /// How it is taken. Empty if a program may have it already.
    pub steps: Vec<Step>,
    /// While these are open nobody begins to use its disks.
    pub(super) claims: Vec<File>,
}

impl Verdict {
    /// Of an address at which nobody has looked yet.
    pub fn nothing(address: Address) -> Self {
        let (obstacles, notes, claims) = (Vec::new(), Vec::new(), Vec::new());
        Self { address, function: None, obstacles, notes, steps: Vec::new(), claims }
    }

    /// Whether its steps take the function from somebody, and do not only open doors to it.
    pub(super) fn takes_it(&self) -> bool {
        self.steps.iter().any(|step| !matches!(step, Step::Give { .. }))
    }
}

/// Looks at functions that are to be taken together. Nothing is changed.
///
/// # Errors
///
/// If a serial number was said that none of them has, or a record is damaged.
pub fn judge(
    kernel: &dyn Kernel,
    addresses: &[Address],
    terms: &Terms<'_>,
) -> Result<Vec<Verdict>, BindError> {
    let machine = kernel.machine();
    let functions: Vec<Option<Function>> =
        addresses.iter().map(|address| Function::at(machine, *address)).collect();
    let serials: Vec<&str> = functions.iter().flatten().filter_map(Function::serial).collect();
    let wrong = terms.even_if_in_use.iter().find(|said| !serials.contains(&said.as_str()));
    if let Some(found) = wrong {
        return Err(BindError::WrongSerial { found: found.clone() });
    }
    let together: Vec<Function> = functions.iter().flatten().cloned().collect();
    let mut look = Look { kernel, terms, together: &together };
    addresses.iter().zip(functions).map(|(address, function)| look.at(*address, function)).collect()
}

/// One look at functions that go together.
struct Look<'a> {
    kernel: &'a dyn Kernel,
    terms: &'a Terms<'a>,
    together: &'a [Function],
}

impl Look<'_> {
    fn at(&mut self, address: Address, function: Option<Function>) -> Result<Verdict, BindError> {
        let mut verdict = Verdict::nothing(address);
        let Some(function) = function else {
            verdict.obstacles.push(self.nothing_at(address));
            return Ok(verdict);
        };
        verdict.steps = self.steps(&function)?;
        if !verdict.steps.is_empty() {
            self.permission(&function, &mut verdict);
            if function.driver.as_deref() != Some(VFIO) {
                self.users(&function, &mut verdict);
            }
            self.isolation(&function, &mut verdict);
            self.driver(&mut verdict);
        }
        verdict.function = Some(function);
        Ok(verdict)
    }

    fn nothing_at(&self, address: Address) -> Obstacle {
        let machine = self.kernel.machine();
        match Function::class_at(machine, address) {
            Some(class) => Obstacle::OtherClass { class },
            None => {
                let all = Function::all(machine);
                Obstacle::NotThere { others: all.iter().map(|one| one.address).collect() }
            }
        }
    }

    fn permission(&self, function: &Function, verdict: &mut Verdict) {
        let own = format!("{}/driver_override", directory(function.address));
        let needed = [own.as_str(), PROBE];
        if let Some(path) = needed.into_iter().find(|path| !self.kernel.may_write(path)) {
            verdict.obstacles.push(Obstacle::NoPermission { path: path.into() });
        }
    }

    /// Who uses its disks, or needs what is on them.
    fn users(&self, function: &Function, verdict: &mut Verdict) {
        let may_be_taken = function
            .serial()
            .is_some_and(|own| self.terms.even_if_in_use.iter().any(|one| one == own));
        let mut found = Vec::new();
        let openers = function.used_by(self.kernel.machine());
        if openers.hidden > 0 {
            let hidden = openers.hidden;
            verdict.notes.push(format!("what {hidden} processes have open cannot be seen"));
        }
        for disk in &function.disks {
            self.paths(disk, &mut found);
            self.contents(disk, verdict, &mut found);
            let is_named = openers.found.iter().any(|used| used.is_of(&disk.name));
            match self.kernel.claim(&format!("dev/{}", disk.name)) {
                Ok(claim) => verdict.claims.push(claim),
                Err(Errno::BUSY) if !is_named => {
                    found.push(Obstacle::Claimed { disk: disk.name.clone() });
                }
                // It was told above that it cannot be read, or who uses it.
                Err(_) => {}
            }
        }
        if !openers.found.is_empty() {
            found.insert(0, Obstacle::InUse { uses: openers.found });
        }
        if may_be_taken {
            verdict.claims.clear();
            verdict.notes.extend(found.iter().map(|one| format!("taken all the same: {one}")));
        } else {
            verdict.obstacles.extend(found);
        }
    }

    fn paths(&self, disk: &Disk, found: &mut Vec<Obstacle>) {
        let taken: Vec<&str> = self
            .together
            .iter()
            .filter_map(|function| Some(function.controller.as_ref()?.name.as_str()))
            .collect();
        if disk.controllers.iter().any(|name| !taken.contains(&name.as_str())) {
            let (disk, controllers) = (disk.name.clone(), disk.controllers.clone());
            found.push(Obstacle::SeveralPaths { disk, controllers });
        }
    }

    fn contents(&self, disk: &Disk, verdict: &mut Verdict, found: &mut Vec<Obstacle>) {
        let machine = self.kernel.machine();
        let parts = disk.partitions(machine);
        for name in core::iter::once(&disk.name).chain(&parts) {
            match (self.terms.marks)(&machine.path(&format!("dev/{name}"))) {
                Err(why) => found.push(Obstacle::Unseen { disk: name.clone(), why }),
                Ok(marks) => {
                    for mark in marks {
                        if mark.is_member {
                            found.push(Obstacle::Member { disk: name.clone(), mark: mark.text });
                        } else {
                            verdict.notes.push(format!("{name} holds {}", mark.text));
                        }
                    }
                }
            }
        }
    }

    /// Whether it can be kept apart from the rest of the machine.
    fn isolation(&self, function: &Function, verdict: &mut Verdict) {
        let machine = self.kernel.machine();
        let address = function.address;
        if function.virtual_functions > 0 {
            let count = function.virtual_functions;
            verdict.obstacles.push(Obstacle::VirtualFunctions { address, count });
        }
        if address.domain() > u32::from(u16::MAX) && machine.has("sys/bus/pci/drivers/vmd") {
            verdict.obstacles.push(Obstacle::BehindVmd { domain: address.domain() });
            return;
        }
        let Some(group) = &function.group else {
            if !self.terms.no_iommu {
                verdict.obstacles.push(Obstacle::NoIommu);
            } else if !machine.has(NO_IOMMU_SWITCH) {
                verdict.obstacles.push(Obstacle::NoIommuMode);
            } else {
                verdict.notes.push(NO_IOMMU_DANGER.into());
            }
            return;
        };
        let others: Vec<Neighbour> = group
            .others
            .iter()
            .filter(|other| !is_harmless(other) && !self.is_taken_too(&other.address))
            .cloned()
            .collect();
        if !others.is_empty() {
            verdict.obstacles.push(Obstacle::SharedGroup { group: group.number, others });
        }
    }

    fn is_taken_too(&self, address: &str) -> bool {
        self.together.iter().any(|function| function.address.to_string() == address)
    }

    fn driver(&self, verdict: &mut Verdict) {
        let machine = self.kernel.machine();
        if machine.has(&format!("sys/bus/pci/drivers/{VFIO}")) {
            return;
        }
        let release = machine.text("proc/sys/kernel/osrelease").unwrap_or_default();
        let modules = machine.text(&format!("lib/modules/{release}/modules.dep"));
        let is_loadable = modules.is_some_and(|text| text.contains("/vfio-pci.ko"));
        verdict.obstacles.push(Obstacle::NoVfio { release, is_loadable });
    }

    fn steps(&self, function: &Function) -> Result<Vec<Step>, BindError> {
        let machine = self.kernel.machine();
        let give = self.terms.owner.map(|uid| Step::Give { uid });
        // Without an IOMMU the doors open to the superuser alone, whoever owns them.
        let give = give.filter(|_| function.group.is_some());
        let known = former(machine, function.address)?;
        if function.driver.as_deref() == Some(VFIO) {
            return Ok(give.into_iter().collect());
        }
        let mut steps = Vec::new();
        let switch = machine.text(NO_IOMMU_SWITCH).filter(|_| function.group.is_none());
        let is_off = switch.as_deref().is_some_and(|text| text != "Y");
        if known.is_none() {
            steps.push(Step::Record {
                driver: function.driver.clone(),
                driver_override: function.driver_override.clone(),
                // Whoever is given back last puts the switch back.
                no_iommu: if is_off { switch } else { switch.and_then(|_| moved_from(machine)) },
            });
        }
        if is_off {
            steps.push(Step::NoIommu { to: "Y".into() });
        }
        steps.push(Step::Override { driver: Some(VFIO.into()) });
        steps.extend(function.driver.clone().map(|driver| Step::Unbind { driver }));
        steps.push(Step::Probe { driver: VFIO.into() });
        steps.extend(give);
        Ok(steps)
    }
}

/// Bridges, and what nobody or another program drives, do not keep a group from being given away
/// (drivers that leave DMA to their user: vfio-pci, pci-stub, pcieport).
fn is_harmless(other: &Neighbour) -> bool {
    let driver = other.driver.as_deref();
    other.is_bridge || driver.is_none_or(|name| [VFIO, "pci-stub", "pcieport"].contains(&name))
}

/// What the switch for life without an IOMMU was before we moved it for another function.
fn moved_from(machine: &Machine) -> Option<String> {
    recorded(machine).into_iter().find_map(|other| former(machine, other).ok()??.no_iommu)
}

const NO_IOMMU_DANGER: &str = "without an IOMMU the device, and so whoever drives it, can read and \
    write all memory of this machine; the kernel marks itself as tainted, and only root may drive it";
