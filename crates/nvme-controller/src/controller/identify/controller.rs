//! Identify Controller structure (Base 2.1 §5.1.13.2.1). Every bit set here stands for an implemented and
//! tested feature.

use tenmil_wire::AdminOpcode;
use tenmil_wire::identify::controller::ControllerType;
use tenmil_wire::identify::{IdentifyController, PowerState};
use tenmil_wire::layout::Ascii;
use tenmil_wire::register::VERSION_2_1;

use crate::controller::Controller;
use crate::controller::config::{ControllerInstance, TransportModel};
use crate::controller::features::supported_notices;
use crate::controller::firmware::{GRANULARITY_BYTES, SLOTS};
use crate::controller::health::{CRITICAL_KELVIN, WARNING_KELVIN};
use crate::controller::power::STATES;
use crate::controller::subsystem::SubsystemState;

/// Maximum seconds of an ANA state transition (ANATT).
const ANA_SECONDS: u8 = 10;
/// Expected maximum minutes of an extended self-test (EDSTT).
const SELF_TEST_MINUTES: u16 = 60;
/// Copy descriptor formats 0h and 1h.
const COPY_FORMATS: u16 = 0b11;

impl Controller {
    pub(super) fn identify_controller(&self) -> IdentifyController {
        let can_format = self.can_format();
        let has_cache = self.has_volatile_cache();
        let uncorrectable = self.can_write_uncorrectable();
        let state = self.subsystem.lock_state();
        let mut page = IdentifyController::zeroed();
        self.put_names(&state, &mut page);
        self.put_admin(&state, can_format, &mut page);
        self.put_limits(&mut page);
        self.put_ana(&mut page);
        self.put_commands(has_cache, uncorrectable, &mut page);
        self.put_transport(&mut page);
        page
    }

    fn put_names(&self, state: &SubsystemState, page: &mut IdentifyController) {
        let info = self.subsystem.constants();
        let mut subnqn = [0; 256];
        for (byte, event) in subnqn.iter_mut().zip(info.nqn.bytes()) {
            *byte = event;
        }
        page.set()
            .vid(self.config.pci_vendor)
            .ssvid(self.config.pci_vendor)
            .sn(Ascii::new(&info.serial))
            .mn(Ascii::new(&info.model))
            .fr(Ascii(state.firmware.active_revision()))
            .subnqn(Ascii(subnqn))
            .cntlid(self.config.cntlid)
            .ver(VERSION_2_1)
            .cntrltype(ControllerType::Io)
            .multiple_controllers(true);
    }

    fn put_admin(&self, state: &SubsystemState, can_format: bool, page: &mut IdentifyController) {
        let has_ana = self.subsystem.constants().ana_groups > 0;
        page.set()
            .oaes(supported_notices(has_ana))
            .host_identifier_128(true)
            .rhii(self.needs_host_identifier())
            .tbkas(true)
            .format(can_format)
            .firmware(self.supports_admin_opcode(AdminOpcode::FirmwareCommit))
            .namespace_management(self.supports_namespace_management())
            .self_test(self.supports_admin_opcode(AdminOpcode::DeviceSelfTest))
            .doorbell_buffer(self.supports_admin_opcode(AdminOpcode::DoorbellBufferConfig))
            .ffsro(true)
            .nofs(SLOTS)
            .fawr(true)
            .fwug(u8::try_from(GRANULARITY_BYTES / 4096).unwrap_or(u8::MAX))
            .cses(true)
            .lpeds(true)
            .telemetry(true)
            .mlps(true)
            .edstt(SELF_TEST_MINUTES)
            .kas(self.keep_alive.granularity_100ms());
        if self.supports_namespace_management() {
            page.set().tnvmcap(state.capacity_bytes()).unvmcap(state.unallocated_bytes().into());
        }
    }

    fn put_limits(&self, page: &mut IdentifyController) {
        let pages = self.config.transfer_bytes_max >> 12;
        let zero_based = |count: u16| u8::try_from(count.saturating_sub(1)).unwrap_or(u8::MAX);
        page.set()
            .mdts(u8::try_from(pages.trailing_zeros()).unwrap_or(0))
            .acl(zero_based(self.config.aborts_max))
            .aerl(zero_based(self.config.event_requests_max))
            .elpe(zero_based(self.config.error_entries))
            .wctemp(WARNING_KELVIN)
            .cctemp(CRITICAL_KELVIN)
            .npss(u8::try_from(STATES.len() - 1).unwrap_or(0))
            .apsts(true);
        for (index, state) in STATES.into_iter().enumerate() {
            let power = PowerState::zeroed().with(|power| power.nops(!state.is_operational));
            page.set().psd(index, power);
        }
    }

    fn put_ana(&self, page: &mut IdentifyController) {
        let groups = self.subsystem.constants().ana_groups;
        if groups == 0 {
            return;
        }
        page.set()
            .anars(true)
            .anatt(ANA_SECONDS)
            .ana_optimized(true)
            .ana_non_optimized(true)
            .ana_inaccessible(true)
            .ana_persistent_loss(true)
            .ana_change(true)
            .ana_group_fixed(true)
            .ana_group_managed(self.supports_namespace_management())
            .anagrpmax(groups)
            .nanagrpid(groups);
    }

    fn put_commands(&self, has_cache: bool, uncorrectable: bool, page: &mut IdentifyController) {
        page.set()
            .sqes_min(6)
            .sqes_max(6)
            .cqes_min(4)
            .cqes_max(4)
            .nn(self.subsystem.constants().nsid_max)
            // Linux rejects a controller with ANA whose MNAN is zero.
            .mnan(self.subsystem.constants().nsid_max)
            .compare(true)
            .write_uncorrectable(uncorrectable)
            .dataset_management(true)
            .write_zeroes(true)
            .save_select(true)
            .reservations(self.subsystem.constants().reservations)
            .timestamp(true)
            .verify(true)
            .copy(true)
            .cdfs(COPY_FORMATS)
            .fused_compare_and_write(self.config.fused_compare_and_write)
            .vwcp(has_cache)
            .fb(3)
            .nwpwpsc(true)
            .wpupcsc(true)
            .pwpsc(true)
            .sgls(self.config.sgls);
    }

    fn put_transport(&self, page: &mut IdentifyController) {
        if let TransportModel::Fabrics { command_capsule_bytes, descriptors_max, quiesce } =
            self.config.transport
        {
            let entries = u16::try_from(self.config.queue_entries_max).unwrap_or(u16::MAX);
            page.set()
                .multiple_ports(true)
                .maxcmd(entries)
                .ioccsz(command_capsule_bytes / 16)
                .iorcsz(1)
                .msdbd(descriptors_max)
                .cqt(u16::try_from(quiesce.ns / 1_000_000).unwrap_or(u16::MAX))
                .disconnect(true);
        }
        if let Some(ControllerInstance { uniquifier, random, resets_max }) = self.config.instance {
            page.set().ciu(uniquifier).cirn(random).ccrl(resets_max);
        }
    }
}
