"""The Hopper target, sm_90a: wgmma, TMA and mbarriers, a warpgroup that copies beside those that multiply."""
