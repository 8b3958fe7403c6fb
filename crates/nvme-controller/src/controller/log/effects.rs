//! Log pages that list supported log pages, commands and features, with their effects (Base 2.1
//! §5.1.12.1.1, §5.1.12.1.6, §5.1.12.1.18).

use tenmil_base::Operation;
use tenmil_wire::log::LogPage;
use tenmil_wire::log::effects::{
    CommandEffects, CommandsEffects, Exclusion, FeatureEffects, FeaturesEffects, LogPageEffects,
    SupportedLogPages,
};
use tenmil_wire::{AdminOpcode, IoOpcode};

use crate::controller::Controller;
use crate::controller::features::FEATURES;

impl Controller {
    pub(super) fn supported_log_pages_page(&self) -> Vec<u8> {
        let mut page = SupportedLogPages::zeroed();
        for &lid in LogPage::ALL {
            if self.supports_log_page(lid) {
                let entry = LogPageEffects::zeroed().with(|entry| entry.lsupp(true));
                page.set().lid(lid.code().into(), entry);
            }
        }
        page.as_bytes().to_vec()
    }

    pub(super) fn command_effects_page(&self) -> Vec<u8> {
        let mut page = CommandsEffects::zeroed();
        for &opcode in AdminOpcode::ALL {
            if self.supports_admin_opcode(opcode) {
                page.set().acs(opcode.code().into(), admin_effects(opcode));
            }
        }
        for &opcode in IoOpcode::ALL {
            if self.supports_io_opcode(opcode) {
                page.set().iocs(opcode.code().into(), io_effects(opcode));
            }
        }
        page.as_bytes().to_vec()
    }

    pub(super) fn feature_effects_page(&self) -> Vec<u8> {
        let mut page = FeaturesEffects::zeroed();
        for attributes in FEATURES
            .into_iter()
            .filter(|attributes| self.feature_attributes(attributes.feature.code()).is_ok())
        {
            let entry = FeatureEffects::zeroed().with(|entry| {
                entry
                    .fsupp(true)
                    .scope_namespace(attributes.is_per_namespace)
                    .scope_controller(!attributes.is_per_namespace)
            });
            page.set().fid(attributes.feature.code().into(), entry);
        }
        page.as_bytes().to_vec()
    }

    /// Whether the queues of this controller support the opcode, as reported in ONCS.
    fn supports_io_opcode(&self, opcode: IoOpcode) -> bool {
        match opcode {
            IoOpcode::Flush
            | IoOpcode::Write
            | IoOpcode::Read
            | IoOpcode::Compare
            | IoOpcode::WriteZeroes
            | IoOpcode::DatasetManagement
            | IoOpcode::Verify
            | IoOpcode::Copy => true,
            IoOpcode::WriteUncorrectable => self.can_write_uncorrectable(),
            IoOpcode::ReservationRegister
            | IoOpcode::ReservationReport
            | IoOpcode::ReservationAcquire
            | IoOpcode::ReservationRelease => self.subsystem.constants().reservations,
            _ => false,
        }
    }

    /// Whether every block device can mark blocks as unreadable; a controller cannot emulate that.
    pub(in crate::controller) fn can_write_uncorrectable(&self) -> bool {
        let state = self.subsystem.lock_state();
        let mut media = state.records.values();
        media.all(|record| record.limits.operations.has(Operation::WriteUncorrectable))
    }
}

fn admin_effects(opcode: AdminOpcode) -> CommandEffects {
    let supported = CommandEffects::zeroed().with(|it| it.csupp(true));
    match opcode {
        AdminOpcode::FormatNvm => supported
            .with(|it| it.lbcc(true).ncc(true).cse(Exclusion::SameNamespace).scope_namespace(true)),
        AdminOpcode::NamespaceManagement => {
            supported.with(|it| it.nic(true).lbcc(true).scope_subsystem(true))
        }
        AdminOpcode::NamespaceAttachment => supported.with(|it| it.nic(true).scope_subsystem(true)),
        AdminOpcode::FirmwareCommit | AdminOpcode::FirmwareImageDownload => {
            supported.with(|it| it.scope_subsystem(true))
        }
        _ => supported.with(|it| it.scope_controller(true)),
    }
}

fn io_effects(opcode: IoOpcode) -> CommandEffects {
    let changes = matches!(
        opcode,
        IoOpcode::Write
            | IoOpcode::WriteUncorrectable
            | IoOpcode::WriteZeroes
            | IoOpcode::DatasetManagement
            | IoOpcode::Copy
    );
    CommandEffects::zeroed().with(|it| it.csupp(true).lbcc(changes).scope_namespace(true))
}
