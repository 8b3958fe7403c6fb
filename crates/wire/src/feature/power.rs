//! Features for power, temperature and time.

use crate::field_type::code;
use crate::layout::layout;

layout! {
    /// 02h: Power Management (Base 2.1 §5.1.25.1.2).
    pub struct PowerManagement(u32) {
        /// Power State.
        ps @ 0..=4: u8;
        /// Workload Hint.
        wh @ 5..=7: u8;
    }

    /// 04h: Temperature Threshold (Base 2.1 §5.1.25.1.3).
    pub struct TemperatureThreshold(u32) {
        /// Temperature Threshold, in kelvins.
        tmpth @ 0..=15: u16;
        /// Threshold Temperature Select: 0 composite, 1 to 8 a sensor, 15 all.
        tmpsel @ 16..=19: u8;
        /// Threshold Type Select: 0 over, 1 under.
        thsel @ 20..=21: u8;
        /// Temperature Threshold Hysteresis, in kelvins.
        tmpthh @ 22..=24: u8;
    }

    /// 0Ch: Autonomous Power State Transition (Base 2.1 §5.1.25.1.6).
    pub struct AutonomousPowerStateTransition(u32) {
        /// Autonomous Power State Transition Enable.
        apste @ 0: bool;
    }

    /// Data structure of 0Ch: one transition per power state (Base 2.1 §5.1.25.1.6).
    pub struct PowerStateTransitions[256] {
        /// Transitions, indexed by the state they leave.
        transition @ 0: PowerStateTransition[32];
    }

    /// A transition (Base 2.1 §5.1.25.1.6).
    pub struct PowerStateTransition(u64) {
        /// Idle Transition Power State.
        itps @ 3..=7: u8;
        /// Idle Time Prior to Transition, in milliseconds; 0 for never.
        itpt @ 8..=31: u32;
    }

    /// 0Dh: Host Memory Buffer, dword 11 (Base 2.1 §5.1.25.2.4).
    pub struct HostMemoryBuffer(u32) {
        /// Enable Host Memory.
        ehm @ 0: bool;
        /// Memory Return: the memory is the one previously allocated to the controller.
        mr @ 1: bool;
        /// Host Memory Non-operational Access Restriction Enable.
        hmnare @ 2: bool;
    }

    /// Data structure returned by Get Features for 0Dh (Base 2.1 §5.1.25.2.4).
    pub struct HostMemoryAttributes[4096] {
        /// Host Memory Buffer Size, in memory pages; dword 12 of Set Features.
        hsize @ 0: u32;
        /// Host Memory Descriptor List Lower Address; dword 13 of Set Features.
        hmdlal @ 4: u32;
        /// Host Memory Descriptor List Upper Address; dword 14 of Set Features.
        hmdlau @ 8: u32;
        /// Host Memory Descriptor List Entry Count; dword 15 of Set Features.
        hmdlec @ 12: u32;
    }

    /// An entry of the host memory descriptor list (Base 2.1 §5.1.25.2.4).
    pub struct HostMemoryDescriptor[16] {
        /// Buffer Address.
        badd @ 0: u64;
        /// Buffer Size, in memory pages.
        bsize @ 8: u32;
    }

    /// 0Eh: Timestamp (Base 2.1 §5.1.25.1.7).
    pub struct Timestamp(u64) {
        /// Milliseconds since 1970, or since a controller level reset.
        milliseconds @ 0..=47: u64;
        /// Synch: the controller may have stopped counting.
        synch @ 48: bool;
        /// Timestamp Origin.
        origin @ 49..=51: TimestampOrigin;
    }

    /// 10h: Host Controlled Thermal Management (Base 2.1 §5.1.25.1.9).
    pub struct ThermalManagement(u32) {
        /// Thermal Management Temperature 2, in kelvins.
        tmt2 @ 0..=15: u16;
        /// Thermal Management Temperature 1, in kelvins.
        tmt1 @ 16..=31: u16;
    }

    /// 11h: Non-Operational Power State Config (Base 2.1 §5.1.25.1.10).
    pub struct NonOperationalPowerState(u32) {
        /// Non-Operational Power State Permissive Mode Enable.
        noppme @ 0: bool;
    }

    /// 1Ah: Spinup Control (Base 2.1 §5.1.25.1.18).
    pub struct SpinupControl(u32) {
        /// Spinup Enable.
        spinupe @ 0: bool;
    }

    /// 1Bh: Power Loss Signaling Config (Base 2.1 §5.1.25.1.19).
    pub struct PowerLossSignaling(u32) {
        /// Power Loss Signaling Mode: 0 off, 1 forced quiescence, 2 emergency power fail.
        plsm @ 0..=1: u8;
    }
}

code! {
    /// Origin of a timestamp (Base 2.1 §5.1.25.1.7).
    pub enum TimestampOrigin {
        /// A controller level reset.
        Reset = 0,
        /// Set by the host.
        Host = 1,
    }
}

impl HostMemoryAttributes {
    /// Address of the descriptor list.
    #[must_use]
    pub fn list_address(&self) -> u64 {
        u64::from(self.hmdlau()) << 32 | u64::from(self.hmdlal())
    }
}

#[cfg(test)]
mod tests {
    use super::{HostMemoryAttributes, PowerStateTransition, Timestamp, TimestampOrigin};
    use crate::layout::Layout;

    #[test]
    fn timestamp_is_48_bits_and_one_attribute_byte() {
        let timestamp = Timestamp::zeroed()
            .with(|it| it.milliseconds(0x0605_0403_0201).origin(TimestampOrigin::Host).synch(true));
        assert_eq!(timestamp.to_bytes(), [1, 2, 3, 4, 5, 6, 0b11, 0]);
    }

    #[test]
    fn autonomous_transition_entry_has_the_bits_of_linux() {
        let transition = PowerStateTransition::zeroed().with(|it| it.itps(3).itpt(100));
        assert_eq!(transition.0, 3 << 3 | 100 << 8);
    }

    #[test]
    fn host_memory_descriptor_list_address_is_joined_from_both_halves() {
        let attributes = HostMemoryAttributes::zeroed().with(|it| it.hmdlal(0x1000).hmdlau(2));
        assert_eq!(attributes.list_address(), 0x2_0000_1000);
    }
}
