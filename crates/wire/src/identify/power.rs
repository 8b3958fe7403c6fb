//! Power states (Base 2.1 §8.1.17).

use crate::layout::layout;

layout! {
    /// A power state (Base 2.1 §5.1.13.2.1, Figure 313).
    #[derive(Copy)]
    pub struct PowerState[32] {
        /// Maximum Power, in units of MXPS.
        mp @ 0: u16;
        /// Flags.
        flags @ 3: u8 {
            /// Max Power Scale: 0.0001 W instead of 0.01 W.
            mxps @ 0: bool;
            /// Non-Operational State.
            nops @ 1: bool;
        };
        /// Entry Latency, in microseconds.
        enlat @ 4: u32;
        /// Exit Latency, in microseconds.
        exlat @ 8: u32;
        /// Read throughput.
        read_throughput @ 12: u8 {
            /// Relative Read Throughput.
            rrt @ 0..=4: u8;
        };
        /// Read latency.
        read_latency @ 13: u8 {
            /// Relative Read Latency.
            rrl @ 0..=4: u8;
        };
        /// Write throughput.
        write_throughput @ 14: u8 {
            /// Relative Write Throughput.
            rwt @ 0..=4: u8;
        };
        /// Write latency.
        write_latency @ 15: u8 {
            /// Relative Write Latency.
            rwl @ 0..=4: u8;
        };
        /// Idle Power, in units of IPS.
        idlp @ 16: u16;
        /// Idle power scale.
        idle_scale @ 18: u8 {
            /// Idle Power Scale: 1 for 0.0001 W, 2 for 0.01 W.
            ips @ 6..=7: u8;
        };
        /// Active Power, in units of APS.
        actp @ 20: u16;
        /// Active power workload and scale.
        active_scale @ 22: u8 {
            /// Active Power Workload.
            apw @ 0..=2: u8;
            /// Active Power Scale: 1 for 0.0001 W, 2 for 0.01 W.
            aps @ 6..=7: u8;
        };
        /// Emergency Power Fail Recovery Time.
        epfrt @ 23: u8;
        /// Forced Quiescence Vault Time.
        fqvt @ 24: u8;
        /// Emergency Power Fail Vault Time.
        epfvt @ 25: u8;
        /// Scales of recovery and quiescence times.
        power_fail_scales @ 26: u8 {
            /// Emergency Power Fail Recovery Time Scale.
            epfrts @ 0..=3: u8;
            /// Forced Quiescence Vault Time Scale.
            fqvts @ 4..=7: u8;
        };
        /// Scale of the vault time.
        vault_scale @ 27: u8 {
            /// Emergency Power Fail Vault Time Scale.
            epfvts @ 0..=3: u8;
        };
    }
}

impl PowerState {
    /// Maximum power in units of 0.1 mW; 0 if not reported.
    #[must_use]
    pub fn power_max(&self) -> u32 {
        let scale = if self.mxps() { 1 } else { 100 };
        u32::from(self.mp()) * scale
    }
}

#[cfg(test)]
mod tests {
    use super::PowerState;

    #[test]
    fn maximum_power_scale_is_one_hundred() {
        let state = PowerState::zeroed().with(|state| state.mp(650));
        assert_eq!(state.power_max(), 65_000);
        assert_eq!(state.with(|state| state.mxps(true)).power_max(), 650);
    }
}
