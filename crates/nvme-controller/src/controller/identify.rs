//! Identify command: selects and builds the requested structure (Base 2.1 §5.1.13).

use tenmil_wire::Status;
use tenmil_wire::admin::Identify;
use tenmil_wire::identify::namespace_identification_descriptor::build_descriptor_list;
use tenmil_wire::identify::{
    Cns, CommandSet, CommandSetVector, CommandSets, ControllerList, IdentifyControllerNvm,
    IdentifyNamespaceIndependent, IdentifyNamespaceNvm, NSID_ALL, NamespaceIdentifier,
    NamespaceList,
};
use tenmil_wire::register::Version;

use super::Controller;
use super::commands::{CommandResult, PAGE_BYTES};
use super::subsystem::{NamespaceEntry, SubsystemState};
use super::transport_interface::{AdminOutcome, AdminResult};

mod controller;
mod namespace;

impl Controller {
    pub(super) fn execute_identify(
        &self,
        identify: &Identify,
        data: &mut Vec<u8>,
    ) -> CommandResult {
        data.clear();
        self.append_identify_structure(identify, data)?;
        data.resize(PAGE_BYTES as usize, 0);
        Ok(AdminOutcome::Done(AdminResult::OK))
    }

    /// Appends the structure of CNS to `page`. The rest of the page is zeroes.
    fn append_identify_structure(
        &self,
        identify: &Identify,
        page: &mut Vec<u8>,
    ) -> Result<(), Status> {
        let nsid = identify.nsid;
        match Cns::from_code(identify.cns) {
            Cns::Namespace => self.append_identify_namespace(nsid, true, page),
            Cns::AllocatedNamespace => self.append_identify_namespace(nsid, false, page),
            Cns::Controller => {
                page.extend(self.identify_controller().as_bytes());
                Ok(())
            }
            Cns::CommandSetController => {
                check_nvm_command_set(identify)?;
                page.extend(identify_controller_nvm().as_bytes());
                Ok(())
            }
            Cns::ActiveNamespaces => self.append_namespace_list(nsid, true, page),
            Cns::AllocatedNamespaces => self.append_namespace_list(nsid, false, page),
            Cns::CommandSetActiveNamespaces => {
                check_nvm_command_set(identify)?;
                self.append_namespace_list(nsid, true, page)
            }
            Cns::CommandSetAllocatedNamespaces => {
                check_nvm_command_set(identify)?;
                self.append_namespace_list(nsid, false, page)
            }
            Cns::Descriptors => self.append_namespace_descriptors(nsid, page),
            Cns::CommandSetNamespace => {
                check_nvm_command_set(identify)?;
                self.append_nvm_namespace(nsid, true, page)
            }
            Cns::CommandSetAllocatedNamespace => {
                check_nvm_command_set(identify)?;
                self.append_nvm_namespace(nsid, false, page)
            }
            Cns::IndependentNamespace => self.append_independent_namespace(nsid, true, page),
            Cns::IndependentAllocatedNamespace => {
                self.append_independent_namespace(nsid, false, page)
            }
            Cns::NamespaceControllers => {
                self.append_attached_controllers(nsid, identify.cntid, page)
            }
            Cns::SubsystemControllers => {
                let state = self.subsystem.lock_state();
                let cntlids = state.controllers.range(identify.cntid..).map(|(&cntlid, _)| cntlid);
                page.extend(ControllerList::new(cntlids).as_bytes());
                Ok(())
            }
            Cns::CommandSets => self.append_command_sets(identify.cntid, page),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Looks up the namespace of an Identify command. Returns `Ok(None)` for a valid identifier without a
    /// namespace, for which the structure is zeroes.
    fn identified_namespace<'a>(
        &self,
        state: &'a SubsystemState,
        nsid: u32,
        must_be_attached: bool,
    ) -> Result<Option<&'a NamespaceEntry>, Status> {
        if nsid == 0 || nsid > self.subsystem.constants().nsid_max {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        let cntlid = self.config.cntlid;
        let found = state.visible_namespace(cntlid, nsid);
        Ok(found.filter(|record| !must_be_attached || record.visibility.is_attached_to(cntlid)))
    }

    fn append_namespace_list(
        &self,
        after: u32,
        must_be_attached: bool,
        page: &mut Vec<u8>,
    ) -> Result<(), Status> {
        if after >= NSID_ALL - 1 {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        let state = self.subsystem.lock_state();
        let cntlid = self.config.cntlid;
        let is_listed = |record: &&NamespaceEntry| {
            !must_be_attached || record.visibility.is_attached_to(cntlid)
        };
        let listed = state.visible_namespaces(cntlid).filter(is_listed).map(|record| record.nsid);
        page.extend(NamespaceList::new(listed.filter(|nsid| *nsid > after)).as_bytes());
        Ok(())
    }

    fn append_namespace_descriptors(&self, nsid: u32, page: &mut Vec<u8>) -> Result<(), Status> {
        let state = self.subsystem.lock_state();
        let identity = self.attached_namespace(&state, nsid)?.identity;
        let mut names = Vec::new();
        if identity.eui64 != [0; 8] {
            names.push(NamespaceIdentifier::Eui64(identity.eui64));
        }
        if identity.nguid != [0; 16] {
            names.push(NamespaceIdentifier::Nguid(identity.nguid));
        }
        if identity.uuid != [0; 16] {
            names.push(NamespaceIdentifier::Uuid(identity.uuid));
        }
        names.push(NamespaceIdentifier::Csi(CommandSet::Nvm));
        page.extend(build_descriptor_list(&names));
        Ok(())
    }

    /// Appends the NVM command set namespace structure. It is all zeroes: no protection information, no
    /// preferred sizes.
    fn append_nvm_namespace(
        &self,
        nsid: u32,
        must_be_attached: bool,
        page: &mut Vec<u8>,
    ) -> Result<(), Status> {
        let state = self.subsystem.lock_state();
        if nsid != NSID_ALL || !self.supports_namespace_management() {
            self.identified_namespace(&state, nsid, must_be_attached)?;
        }
        page.extend(IdentifyNamespaceNvm::zeroed().as_bytes());
        Ok(())
    }

    fn append_independent_namespace(
        &self,
        nsid: u32,
        must_be_attached: bool,
        page: &mut Vec<u8>,
    ) -> Result<(), Status> {
        let state = self.subsystem.lock_state();
        let found = self.identified_namespace(&state, nsid, must_be_attached)?;
        let structure = found.map_or_else(IdentifyNamespaceIndependent::zeroed, |record| {
            self.independent_structure(record, self.is_read_only_to_host(&state, nsid))
        });
        page.extend(structure.as_bytes());
        Ok(())
    }

    fn append_attached_controllers(
        &self,
        nsid: u32,
        from: u16,
        page: &mut Vec<u8>,
    ) -> Result<(), Status> {
        let state = self.subsystem.lock_state();
        let found = self.identified_namespace(&state, nsid, false)?;
        let cntlids =
            found.into_iter().flat_map(|record| record.visibility.attached_cntlids_from(from));
        page.extend(ControllerList::new(cntlids).as_bytes());
        Ok(())
    }

    /// Appends the command set combinations: the NVM command set is the only one.
    fn append_command_sets(&self, cntlid: u16, page: &mut Vec<u8>) -> Result<(), Status> {
        let state = self.subsystem.lock_state();
        if cntlid != u16::MAX && !state.controllers.contains_key(&cntlid) {
            return Err(Status::INVALID_FIELD);
        }
        let nvm = CommandSetVector::zeroed().with(|vector| vector.nvm(true));
        page.extend(CommandSets::zeroed().with(|sets| sets.vector(0, nvm)).as_bytes());
        Ok(())
    }
}

fn check_nvm_command_set(identify: &Identify) -> Result<(), Status> {
    match CommandSet::from_code(identify.csi) {
        CommandSet::Nvm => Ok(()),
        _ => Err(Status::INVALID_FIELD),
    }
}

/// NVM command set controller structure: no limits besides MDTS; version 1.1 of the command set.
fn identify_controller_nvm() -> IdentifyControllerNvm {
    IdentifyControllerNvm::zeroed()
        .with(|structure| structure.ver(Version::zeroed().with(|ver| ver.major(1).minor(1))))
}
