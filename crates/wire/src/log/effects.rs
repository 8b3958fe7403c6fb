//! Support and effects: log pages (00h), commands (05h), features (12h), management commands (13h),
//! lockdown (14h).

use crate::field_type::code;
use crate::layout::layout;

layout! {
    /// 00h: Supported Log Pages; the index is the log page identifier (Base 2.1 §5.1.12.1.1).
    pub struct SupportedLogPages[1024] {
        /// LID Supported and Effects.
        lid @ 0: LogPageEffects[256];
    }

    /// LID Supported and Effects (Base 2.1 §5.1.12.1.1).
    pub struct LogPageEffects(u32) {
        /// LID Supported.
        lsupp @ 0: bool;
        /// Index Offset Supported.
        ios @ 1: bool;
        /// LID Specific Parameter.
        lidsp @ 16..=31: u16;
    }

    /// 05h: Commands Supported and Effects; the index is the opcode (Base 2.1 §5.1.12.1.6).
    pub struct CommandsEffects[4096] {
        /// Admin Commands.
        acs @ 0: CommandEffects[256];
        /// I/O Commands.
        iocs @ 1024: CommandEffects[256];
    }

    /// Commands Supported and Effects (Base 2.1 §5.1.12.1.6).
    pub struct CommandEffects(u32) {
        /// Command Supported.
        csupp @ 0: bool;
        /// Logical Block Content Change.
        lbcc @ 1: bool;
        /// Namespace Capability Change.
        ncc @ 2: bool;
        /// Namespace Inventory Change.
        nic @ 3: bool;
        /// Controller Capability Change.
        ccc @ 4: bool;
        /// Command Submission and Execution Relaxations.
        cser @ 14..=15: u8;
        /// Command Submission and Execution.
        cse @ 16..=18: Exclusion;
        /// UUID Selection Supported.
        uss @ 19: bool;
        /// Scope: namespace.
        scope_namespace @ 20: bool;
        /// Scope: controller.
        scope_controller @ 21: bool;
        /// Scope: NVM set.
        scope_nvm_set @ 22: bool;
        /// Scope: endurance group.
        scope_endurance_group @ 23: bool;
        /// Scope: domain.
        scope_domain @ 24: bool;
        /// Scope: NVM subsystem.
        scope_subsystem @ 25: bool;
    }

    /// 12h: Feature Identifiers Supported and Effects (Base 2.1 §5.1.12.1.18).
    pub struct FeaturesEffects[1024] {
        /// FID Supported and Effects; the index is the feature identifier.
        fid @ 0: FeatureEffects[256];
    }

    /// 13h: NVMe-MI Commands Supported and Effects (Base 2.1 §5.1.12.1.19).
    pub struct ManagementEffects[4096] {
        /// NVMe-MI Command Supported and Effects; the index is the opcode.
        command @ 0: FeatureEffects[256];
    }

    /// FID Supported and Effects (Base 2.1 §5.1.12.1.18).
    pub struct FeatureEffects(u32) {
        /// FID Supported.
        fsupp @ 0: bool;
        /// User Data Content Change.
        udcc @ 1: bool;
        /// Namespace Capability Change.
        ncc @ 2: bool;
        /// Namespace Inventory Change.
        nic @ 3: bool;
        /// Controller Capability Change.
        ccc @ 4: bool;
        /// UUID Selection Supported.
        uss @ 19: bool;
        /// Scope: namespace.
        scope_namespace @ 20: bool;
        /// Scope: controller.
        scope_controller @ 21: bool;
        /// Scope: NVM set.
        scope_nvm_set @ 22: bool;
        /// Scope: endurance group.
        scope_endurance_group @ 23: bool;
        /// Scope: domain.
        scope_domain @ 24: bool;
        /// Scope: NVM subsystem.
        scope_subsystem @ 25: bool;
        /// Scope: controller data queue.
        scope_data_queue @ 26: bool;
    }

    /// 14h: Command and Feature Lockdown (Base 2.1 §5.1.12.1.20).
    pub struct LockdownPage[512] {
        /// Contents of the list.
        contents @ 0: u8 {
            /// Scope: 0 admin commands, 2 features, 3 MI commands, 4 PCIe commands.
            scope @ 0..=3: u8;
            /// 0 commands that can be prohibited, 1 prohibited, 2 prohibited out of band.
            listed @ 4..=5: u8;
        };
        /// Length of the list.
        length @ 3: u8;
        /// Command and Feature Identifiers.
        identifier @ 4: u8[508];
    }
}

code! {
    /// CSE: commands that may not execute concurrently (Base 2.1 §5.1.12.1.6).
    pub enum Exclusion {
        /// No restriction.
        None = 0,
        /// No other command to the same namespace.
        SameNamespace = 1,
        /// No other command to any namespace.
        AnyNamespace = 2,
    }
}

#[cfg(test)]
mod tests {
    use super::{CommandEffects, CommandsEffects, Exclusion, SupportedLogPages};

    #[test]
    fn command_effects_are_indexed_by_opcode_with_io_in_the_second_half() {
        let write = CommandEffects::zeroed().with(|it| it.csupp(true).lbcc(true));
        let format = write.with(|it| it.cse(Exclusion::AnyNamespace));
        let page = CommandsEffects::zeroed().with(|page| page.acs(0x80, format).iocs(1, write));
        assert_eq!(page.as_bytes()[0x200..0x204], [3, 0, 2, 0]);
        assert_eq!(page.as_bytes()[1028..1032], [3, 0, 0, 0]);
        assert_eq!(page.acs(256), None);
    }

    #[test]
    fn supported_log_page_is_bit_0_of_its_dword() {
        let mut bytes = [0; 1024];
        bytes[8] = 1;
        let page = SupportedLogPages::from_bytes(&bytes);
        assert_eq!(page.lid(2).map(|it| it.lsupp()), Some(true));
        assert_eq!(page.lid(1).map(|it| it.lsupp()), Some(false));
    }
}
