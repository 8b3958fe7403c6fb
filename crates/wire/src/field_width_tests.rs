//! Independent check of field offsets.
//!
//! Structures are declared with offsets, and the round-trip test does not detect a wrong offset
//! that overlaps nothing. Here the largest structures are listed as in C drivers: field after field
//! with its length in bytes, reserved ones as `_`; the sums must equal the offsets.

use crate::identify::{IdentifyController, IdentifyNamespace};
use crate::layout::Layout;
use crate::log::health::HealthInformation;

fn assert_field_widths<T: Layout>(widths: &str) {
    let mut at = 0;
    let mut fields = T::fields().iter();
    let words: Vec<_> = widths.split_whitespace().collect();
    for &[name, bytes] in words.as_chunks::<2>().0 {
        let bytes: usize = bytes.parse().unwrap();
        if name != "_" {
            let field = fields.next().unwrap();
            let declared = (field.name, field.bit, field.width * field.count);
            assert_eq!(declared, (name, at * 8, bytes * 8), "{}", T::NAME);
        }
        at += bytes;
    }
    assert_eq!((at, fields.count()), (T::BYTES, 0), "{}", T::NAME);
}

#[test]
fn identify_controller_field_widths_match() {
    assert_field_widths::<IdentifyController>(
        "vid 2 ssvid 2 sn 20 mn 40 fr 8 rab 1 ieee 3 cmic 1 mdts 1 cntlid 2 ver 4 rtd3r 4 rtd3e 4
         oaes 4 ctratt 4 rrls 2 bpcap 1 _ 1 nssl 4 _ 2 plsi 1 cntrltype 1 fguid 16 crdt1 2 crdt2 2
         crdt3 2 crcap 1 ciu 1 cirn 8 _ 96 _ 13 nvmsr 1 vwci 1 mec 1
         oacs 2 acl 1 aerl 1 frmw 1 lpa 1 elpe 1 npss 1 avscc 1 apsta 1 wctemp 2 cctemp 2 mtfa 2
         hmpre 4 hmmin 4 tnvmcap 16 unvmcap 16 rpmbs 4 edstt 2 dsto 1 fwug 1 kas 2 hctma 2 mntmt 2
         mxtmt 2 sanicap 4 hmminds 4 hmmaxd 2 nsetidmax 2 endgidmax 2 anatt 1 anacap 1 anagrpmax 4
         nanagrpid 4 pels 4 domainid 2 kpioc 1 _ 1 mptfawr 2 _ 6 megcap 16 tmpthha 1 _ 1 cqt 2 _ 124
         sqes 1 cqes 1 maxcmd 2 nn 4 oncs 2 fuses 2 fna 1 vwc 1 awun 2 awupf 2 icsvscc 1 nwpc 1
         acwu 2 cdfs 2 sgls 4 mnan 4 maxdna 16 maxcna 4 oaqd 4 rhiri 1 hirt 1 cmmrtd 2 nmmrtd 2
         minmrtg 1 maxmrtg 1 trattr 1 _ 1 mcudmq 2 mnsudmq 2 mcmr 2 nmcmr 2 mcdqpc 2 _ 180
         subnqn 256 _ 768 ioccsz 4 iorcsz 4 icdoff 2 fcatt 1 msdbd 1 ofcs 2 dctype 1 ccrl 1 _ 240
         psd 1024 vendor 1024",
    );
}

#[test]
fn identify_namespace_field_widths_match() {
    assert_field_widths::<IdentifyNamespace>(
        "nsze 8 ncap 8 nuse 8 nsfeat 1 nlbaf 1 flbas 1 mc 1 dpc 1 dps 1 nmic 1 rescap 1 fpi 1
         dlfeat 1 nawun 2 nawupf 2 nacwu 2 nabsn 2 nabo 2 nabspf 2 noiob 2 nvmcap 16 npwg 2 npwa 2
         npdg 2 npda 2 nows 2 mssrl 2 mcl 4 msrc 1 kpios 1 nulbaf 1 _ 1 kpiodaag 4 _ 4 anagrpid 4
         _ 3 nsattr 1 nvmsetid 2 endgid 2 nguid 16 eui64 8 lbaf 256 vendor 3712",
    );
}

#[test]
fn health_log_field_widths_match() {
    assert_field_widths::<HealthInformation>(
        "critical_warning 1 composite_temperature 2 available_spare 1 available_spare_threshold 1
         percentage_used 1 endurance_group_warnings 1 _ 25 data_units_read 16 data_units_written 16
         host_read_commands 16 host_write_commands 16 controller_busy_minutes 16 power_cycles 16
         power_on_hours 16 unexpected_power_losses 16 media_errors 16 error_log_entries 16
         warning_temperature_minutes 4 critical_temperature_minutes 4 temperature_sensor 16
         thermal_1_transitions 4 thermal_2_transitions 4 thermal_1_seconds 4 thermal_2_seconds 4
         _ 280",
    );
}
